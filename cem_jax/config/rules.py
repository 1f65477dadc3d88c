"""Constraints between the fields of a configuration.

A rule reads fields by attribute and yields messages, which give the numbers.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from cem_jax.sharding.axes import MESH_AXES
from cem_jax.sharding.divide import Size, nearest_divisors, size_faults, undivided


def violations(c: Any, *, partial: bool) -> Iterator[str]:
    """Yield the message of every rule that the configuration `c` breaks.

    A `partial` configuration lacks the fields that are invalid; rules that read one are skipped.
    """
    for rule in _RULES:
        try:
            yield from rule(c)
        except AttributeError:
            if not partial:
                raise


def _heads(c: Any) -> Iterator[str]:
    dim, heads = c.model.dim, c.model.attention.heads
    if dim % heads:
        fitting = nearest_divisors(dim, heads)
        yield (
            f"model.attention.heads: {heads} does not divide model.dim {dim}; "
            f"nearest: {_listed(fitting)}"
        )
    elif c.model.attention.position == "rope" and (dim // heads) % 2:
        yield (
            f"model.attention.position: rope rotates pairs, so it needs an even head dimension; "
            f"model.dim {dim} / model.attention.heads {heads} is {dim // heads}"
        )


def _tau(c: Any) -> Iterator[str]:
    tau = c.model.attention.tau
    if tau not in ("sqrt_head_dim", "sqrt_model_dim") and not _is_positive(tau):
        yield (
            "model.attention.tau: expected sqrt_head_dim, sqrt_model_dim or a decimal greater than "
            f"0, got {tau!r}"
        )


def _diagonal(c: Any) -> Iterator[str]:
    a = c.model.attention
    if a.kind == "cem" and a.diagonal_in_update and a.diagonal == "none":
        yield (
            "model.attention.diagonal_in_update: True needs a diagonal, but "
            "model.attention.diagonal is none; choose shared or per_head"
        )


def _data_source(c: Any) -> Iterator[str]:
    if c.data.path and c.data.mixture:
        yield f"data.path: set it ({c.data.path!r}) or data.mixture, not both"


def _mixture(c: Any) -> Iterator[str]:
    for entry in c.data.mixture:
        directory, _, weight = entry.rpartition("=")
        if not directory or not _is_positive(weight):
            yield (
                "data.mixture: expected entries directory=weight with a weight greater than 0, "
                f"got {entry!r}"
            )


def _duration(c: Any) -> Iterator[str]:
    if c.train.steps is not None and c.train.tokens is not None:
        yield (
            f"train.steps: set it ({c.train.steps:,}) or train.tokens ({c.train.tokens:,}), "
            "not both; set the other to None"
        )


def _microbatch(c: Any) -> Iterator[str]:
    batch, micro = c.train.global_batch, c.train.microbatch
    if micro is not None and batch % micro:
        fitting = _listed(nearest_divisors(batch, micro))
        yield (
            f"train.microbatch: {micro} does not divide train.global_batch {batch}; "
            f"nearest: {fitting}"
        )


def mesh_sizes(c: Any) -> dict[str, int]:
    """Return the devices along each mesh axis as configured; -1 means the remaining ones."""
    return {axis: getattr(c.mesh, axis) for axis in MESH_AXES}


def split_sizes(c: Any) -> list[Size]:
    """Return every field whose size a mesh may split, with the other constraints on it."""
    dim, heads, train = c.model.dim, c.model.attention.heads, c.train
    pairs = 2 if c.model.attention.position == "rope" else 1  # an even head dimension
    widest = ("model.dim / 2", dim // 2) if pairs == 2 else ("model.dim", dim)
    if train.microbatch is None:
        rows = Size("train.global_batch", train.global_batch, "batch")
    else:
        whole = ("train.global_batch", train.global_batch)
        rows = Size("train.microbatch", train.microbatch, "batch", divides=whole)
    return [
        Size("model.vocab_size", c.model.vocab_size, "vocab", least=c.model.vocab_size),
        Size("model.dim", dim, "embed", multiple=heads * pairs),
        Size("model.attention.heads", heads, "heads", divides=widest),
        Size("model.mlp.dim", c.model.mlp.dim, "mlp"),
        Size("data.context", c.data.context, "sequence"),
        rows,
    ]


def _split(c: Any) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", c.eval.split):
        yield (
            "eval.split: expected a split's name, such as validation, made of letters, digits, "
            f"'_', '-' and '.', got {c.eval.split!r}"
        )


def _profile(c: Any) -> Iterator[str]:
    steps = c.log.profile_steps
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        yield (
            "log.profile_steps: expected (first, last) with first not after last, or (), "
            f"got {steps}"
        )


def _cache(c: Any) -> Iterator[str]:
    if c.log.compile_cache == "":
        yield "log.compile_cache: expected a directory or None, got an empty string"


_RULES = (
    _heads,
    _tau,
    _diagonal,
    _data_source,
    _mixture,
    _duration,
    _microbatch,
    lambda c: size_faults(mesh_sizes(c)),
    # Only for axes with a given size: -1 can be resolved only where the devices are known.
    lambda c: undivided(split_sizes(c), mesh_sizes(c)),
    _split,
    _profile,
    _cache,
)


def _is_positive(text: str) -> bool:
    try:
        return math.isfinite(number := float(text)) and number > 0
    except ValueError:
        return False


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))

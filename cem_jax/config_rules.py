"""What must hold between the fields of a configuration, each rule with the numbers in its message.

A rule reads fields by attribute and yields messages. It is given a view of a configuration that
raises `UnknownField` for a field that is itself faulty; the rule is then skipped.
"""

import math
import re
from collections.abc import Iterator
from typing import Any


class UnknownField(Exception):
    """A field that a rule needs has no usable value."""


def violations(c: Any) -> Iterator[str]:
    """The message of every rule that `c` breaks."""
    for rule in _RULES:
        try:
            yield from rule(c)
        except UnknownField:
            continue


def _heads(c: Any) -> Iterator[str]:
    dim, heads = c.model.dim, c.model.attention.heads
    if dim % heads:
        fitting = _nearest_divisors(dim, heads)
        yield (
            f"model.attention.heads: {heads} does not divide model.dim {dim}; "
            f"nearest: {', '.join(map(str, fitting))}"
        )
    elif c.model.attention.position == "rope" and (dim // heads) % 2:
        yield (
            f"model.attention.position: rope rotates pairs, so it needs an even head dimension; "
            f"model.dim {dim} / model.attention.heads {heads} is {dim // heads}"
        )


def _tau(c: Any) -> Iterator[str]:
    tau = c.model.attention.tau
    if tau in ("sqrt_head_dim", "sqrt_model_dim"):
        return
    try:
        number = float(tau)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
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
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not directory or not math.isfinite(number) or number <= 0:
            yield (
                "data.mixture: expected entries directory=weight with a weight greater than 0, "
                f"got {entry!r}"
            )


def _duration(c: Any) -> Iterator[str]:
    if c.train.steps is not None and c.train.tokens is not None:
        yield (
            f"train.steps: set it ({c.train.steps:,}) or train.tokens ({c.train.tokens:,}), "
            "not both; the other is None"
        )


def _microbatch(c: Any) -> Iterator[str]:
    batch, micro = c.train.global_batch, c.train.microbatch
    if micro is not None and batch % micro:
        fitting = ", ".join(map(str, _nearest_divisors(batch, micro)))
        yield (
            f"train.microbatch: {micro} does not divide train.global_batch {batch}; "
            f"nearest: {fitting}"
        )


def _mesh(c: Any) -> Iterator[str]:
    sizes = {name: getattr(c.mesh, name) for name in ("data", "fsdp", "tensor", "context")}
    for name, size in sizes.items():
        if size == 0:
            yield f"mesh.{name}: expected a number of devices or -1 (what is left), got 0"
    free = [f"mesh.{name}" for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        yield f"{free[0]}: one axis at most may be -1, but so are {', '.join(free[1:])}"


def _mesh_divides(c: Any) -> Iterator[str]:
    """Axes of a stated size. What -1 comes to is known only beside the devices."""
    rows = c.train.microbatch or c.train.global_batch
    rows_name = "train.microbatch" if c.train.microbatch else "train.global_batch"
    checks = (
        ("model.attention.heads", c.model.attention.heads, "mesh.tensor", c.mesh.tensor),
        ("model.mlp.dim", c.model.mlp.dim, "mesh.tensor", c.mesh.tensor),
        ("data.context", c.data.context, "mesh.context", c.mesh.context),
        (rows_name, rows, "mesh.data", c.mesh.data),
        (rows_name, rows, "mesh.fsdp", c.mesh.fsdp),
    )
    broken = False
    for name, size, axis, devices in checks:
        if devices > 1 and size % devices:
            broken = True
            yield f"{name}: {size} is not a multiple of {axis} {devices}"
    data, fsdp = c.mesh.data, c.mesh.fsdp
    if not broken and data > 1 and fsdp > 1 and rows % (data * fsdp):
        yield (
            f"{rows_name}: {rows} is not a multiple of mesh.data {data} times mesh.fsdp {fsdp}, "
            f"{data * fsdp}"
        )


def _split(c: Any) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", c.eval.split):
        yield (
            "eval.split: expected a split's name, such as validation, of letters, digits, "
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
    _mesh,
    _mesh_divides,
    _split,
    _profile,
    _cache,
)


def _nearest_divisors(whole: int, wanted: int) -> list[int]:
    """The divisors of `whole` on either side of `wanted`."""
    divisors = {d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0}
    divisors |= {whole // d for d in divisors}
    below = max((d for d in divisors if d < wanted), default=None)
    above = min((d for d in divisors if d > wanted), default=None)
    return [d for d in (below, above) if d is not None]

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
            f"nearest: {_listed(fitting)}"
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
        fitting = _listed(_nearest_divisors(batch, micro))
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
    heads, width, context = c.model.attention.heads, c.model.mlp.dim, c.data.context
    data, fsdp, tensor = c.mesh.data, c.mesh.fsdp, c.mesh.tensor
    batch, micro = c.train.global_batch, c.train.microbatch
    rows = ("train.microbatch", micro, batch) if micro else ("train.global_batch", batch, None)
    shared = math.gcd(heads, width)  # of both mesh.tensor is a divisor
    found = [
        _undivided("model.attention.heads", heads, c.model.dim, "mesh.tensor", tensor, shared),
        _undivided("model.mlp.dim", width, None, "mesh.tensor", tensor, shared),
        _undivided("data.context", context, None, "mesh.context", c.mesh.context, context, 2),
        _undivided(*rows, "mesh.data", data, _left(rows[1], fsdp)),
        _undivided(*rows, "mesh.fsdp", fsdp, _left(rows[1], data)),
    ]
    if not any(found[3:]) and data > 1 and fsdp > 1:
        found.append(_undivided(*rows, "mesh.data times mesh.fsdp", data * fsdp, rows[1]))
    yield from (message for message in found if message)


def _undivided(
    name: str, size: int, whole: int | None, axis: str, devices: int, limit: int, chunks: int = 1
) -> str | None:
    """That `size` does not divide over an axis, and what would.

    Args:
      whole: what `size` must itself divide, if anything.
      limit: what the axis must divide, other fields considered.
      chunks: how many parts each device gets: attention gives an early and a late one.
    """
    ways = devices * chunks
    if devices <= 1 or size % ways == 0:
        return None
    fitting = _nearest_divisors(limit // chunks if limit % chunks == 0 else 1, devices)
    if whole is None:
        sizes = [near for near in (size // ways * ways, (size // ways + 1) * ways) if near]
    else:
        sizes = _nearest_divisors(whole, size, ways)
    nearest = [f"{axis} {_listed(fitting)}", *([f"{name} {_listed(sizes)}"] if sizes else [])]
    over = f"{axis} {devices}" + (f" times {chunks} chunks, {ways}" if chunks > 1 else "")
    return f"{name}: {size} is not a multiple of {over}; nearest: {' or '.join(nearest)}"


def _left(rows: int, devices: int) -> int:
    """Rows for the other axis, if these divide."""
    return rows // devices if devices > 1 and rows % devices == 0 else rows


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


def _nearest_divisors(whole: int, wanted: int, step: int = 1) -> list[int]:
    """The divisors of `whole` that are multiples of `step`, on either side of `wanted`."""
    divisors = {d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0}
    divisors |= {whole // d for d in divisors}
    fitting = [d for d in divisors if d % step == 0]
    below = max((d for d in fitting if d < wanted), default=None)
    above = min((d for d in fitting if d > wanted), default=None)
    return [d for d in (below, above) if d is not None]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))

"""Checks of a mesh's sizes and of the dimensions that they must divide. Plain numbers, no JAX.

JAX silently replicates an array that does not divide evenly, so this is checked before anything
runs: by the configuration for the axes whose size it states, and by `cem train` for the actual
mesh.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cem_jax.errors import UserError
from cem_jax.sharding.axes import CHUNKS, LOGICAL_RULES, MESH_AXES, ways


@dataclass(frozen=True)
class Size:
    """A size that a mesh splits, and its other constraints.

    Args:
      field: its name, for messages.
      size: its value.
      dim: the logical name of the dimensions that have this size.
      divides: name and value of a number that it must divide.
      multiple: a number that it must be a multiple of.
      least: its minimum.
    """

    field: str
    size: int
    dim: str
    divides: tuple[str, int] | None = None
    multiple: int = 1
    least: int = 1


def size_faults(sizes: Mapping[str, int]) -> list[str]:
    """List the faults in the numbers of devices per axis; one may be -1, for the remaining ones."""
    faults = [f"mesh.{axis}: no such axis" for axis in sizes if axis not in MESH_AXES]
    faults += [
        f"mesh.{axis}: expected a positive number of devices or -1 (what is left), got {size}"
        for axis, size in sizes.items()
        if size != -1 and size < 1
    ]
    open_axes = [f"mesh.{axis}" for axis in MESH_AXES if sizes.get(axis) == -1]
    if len(open_axes) > 1:
        faults.append(f"{open_axes[0]}: only one axis may be -1, not also {_listed(open_axes[1:])}")
    return faults


def resolve_sizes(sizes: Mapping[str, int], count: int) -> tuple[int, ...]:
    """Return the number of devices along each of MESH_AXES, of `count` in all.

    An axis missing from `sizes` has size 1; one may be -1, for the remaining devices.

    Raises:
      UserError: the sizes are faulty, or their product is not `count`.
    """
    faults = size_faults(sizes)
    if faults:
        raise UserError(*faults)
    wanted = [sizes.get(axis, 1) for axis in MESH_AXES]
    product, is_open = abs(math.prod(wanted)), -1 in wanted
    if count % product or (not is_open and count != product):
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        needed = f"a multiple of {product}" if is_open else str(product)
        noun = "device" if needed == "1" else "devices"
        raise UserError(
            f"mesh: {shown} needs {needed} {noun}; there {'is' if count == 1 else 'are'} {count}"
        )
    return tuple(count // product if size == -1 else size for size in wanted)


def undivided(
    split: Sequence[Size], sizes: Mapping[str, int], *, resolved: bool = False
) -> list[str]:
    """List each size that does not divide over the mesh, with the nearest accepted sizes.

    Args:
      split: all sizes that the mesh splits.
      sizes: devices along each axis; -1 (not known yet) counts as 1.
      resolved: the sizes are those of a mesh of all devices, so changing one axis alone
        does not help.
    """
    known = {axis: size for axis, size in sizes.items() if size > 1}
    return [_fault(one, split, known, resolved) for one in split if one.size % _parts(one, known)]


def _parts(one: Size, sizes: Mapping[str, int]) -> int:
    """Return the number of equal parts into which the mesh splits a size, counting chunks."""
    devices = ways(sizes, one.dim)
    return devices * CHUNKS.get(one.dim, 1) if devices > 1 else 1


def _fault(one: Size, split: Sequence[Size], sizes: Mapping[str, int], resolved: bool) -> str:
    axes = [axis for axis in LOGICAL_RULES[one.dim] if axis in sizes]
    over = " × ".join(f"mesh.{axis} {sizes[axis]}" for axis in axes)
    chunks, parts = CHUNKS.get(one.dim, 1), _parts(one, sizes)
    if chunks > 1:
        over += f" × {chunks} chunks"
    if len(axes) > 1 or chunks > 1:
        over += f", {parts}"
    offers = "" if resolved else _offered_axes(one, axes, split, sizes)
    nearest = _nearest_sizes(one, parts)
    if nearest:
        offers += f"{' or ' * bool(offers)}{one.field} {_listed(nearest)}"
    if offers:
        advice = f"; nearest: {offers}"
    else:
        advice = "; no divisor of {} {} is".format(*one.divides) if one.divides else ""
    return f"{one.field}: {one.size} is not a multiple of {over}{advice}"


def _offered_axes(
    one: Size, axes: Sequence[str], split: Sequence[Size], sizes: Mapping[str, int]
) -> str:
    """Return the axes at fault, each with the nearest sizes that divide everything it splits."""
    blamed = [axis for axis in axes if one.size % _parts(one, {axis: sizes[axis]})]
    others = {name: n for name, n in sizes.items() if name not in (blamed or axes)}
    offers = []
    for axis in blamed or axes:
        beside = others if blamed else {name: n for name, n in sizes.items() if name != axis}
        limits = [_limit(other, beside) for other in split if axis in LOGICAL_RULES[other.dim]]
        near = nearest_divisors(math.gcd(*limits), sizes[axis]) if all(limits) else []
        if near:
            offers.append(f"mesh.{axis} {_listed(near)}")
            others[axis] = math.lcm(*near)  # whichever is chosen, the next axis fits beside it
    return " and ".join(offers) if blamed else " or ".join(offers)


def _limit(one: Size, others: Mapping[str, int]) -> int:
    """Return what one more axis must divide, given the others; 0 if no axis size works."""
    taken = _parts(one, others)
    chunks = 1 if taken > 1 else CHUNKS.get(one.dim, 1)
    if one.size % (taken * chunks) == 0:
        return one.size // (taken * chunks)
    return 1 if taken == 1 else 0


def _nearest_sizes(one: Size, parts: int) -> list[int]:
    """Return the nearest sizes on either side that divide over the mesh and keep other limits."""
    step = math.lcm(parts, one.multiple)
    if one.divides is not None:
        return nearest_divisors(one.divides[1], one.size, step)
    below = one.size // step * step
    return [size for size in (below, below + step) if size >= one.least]


def nearest_divisors(whole: int, wanted: int, step: int = 1) -> list[int]:
    """Return the divisors of `whole` that are multiples of `step`, on either side of `wanted`."""
    divisors = {d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0}
    divisors |= {whole // d for d in divisors}
    fitting = [d for d in divisors if d % step == 0]
    below = max((d for d in fitting if d < wanted), default=None)
    above = min((d for d in fitting if d > wanted), default=None)
    return [d for d in (below, above) if d is not None]


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))

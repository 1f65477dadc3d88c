"""Layout constraints on arrays inside a jitted function, under the mesh in use (`jax.set_mesh`).

The axes are known by name; an axis of another name, or of size 1, is ignored.
"""

import math
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

BATCH_AXES = ("data", "fsdp")
HEAD_AXES = ("tensor",)
POSITION_AXES = ("context",)


class Split(NamedTuple):
    """The axes of the mesh in use that split rows, heads and positions, each with its size."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    positions: tuple[str, ...]
    rows: int
    columns: int
    places: int


def split_in_use() -> Split:
    """That of the mesh set by `jax.set_mesh`, without the axes that are manual already."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {
        name: size
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if size > 1 and kind != AxisType.Manual
    }
    found = [
        tuple(axis for axis in axes if axis in sizes)
        for axes in (BATCH_AXES, HEAD_AXES, POSITION_AXES)
    ]
    return Split(*found, *(math.prod(sizes[axis] for axis in axes) for axes in found))


def lay_out(x: jax.Array, *dims: str | None) -> jax.Array:
    """`x` split as `dims` ("rows", "positions", "heads" or None) say, if the mesh in use does."""
    split = split_in_use()
    if split.rows == split.columns == split.places == 1:
        return x
    return lax.with_sharding_constraint(x, spec(dims, split))


@jax.custom_vjp
def whole_rows(weight: jax.Array) -> jax.Array:
    """A weight [F, D] of which each device has part of every row (fsdp), gathered; F stays split.

    Left to itself XLA multiplies piece by piece while the pieces go round, and adds up outputs
    that are much larger than the weight. The gradient is summed and split again at once.
    """
    return _weight_as(weight, None)


def _weight_as(weight, rows):
    split = split_in_use()
    if "fsdp" not in split.batch:
        return weight
    return lax.with_sharding_constraint(weight, P(split.heads or None, rows))


whole_rows.defvjp(
    lambda weight: (whole_rows(weight), None),
    lambda _, bar: (_weight_as(bar, "fsdp"),),
)


def spec(dims, split: Split) -> P:
    """The partition of an array whose dimensions are split as `dims` say."""
    axes = {"rows": split.batch, "heads": split.heads, "positions": split.positions, None: ()}
    return P(*(axes[dim] or None for dim in dims))

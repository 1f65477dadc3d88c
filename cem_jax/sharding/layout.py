"""Layout constraints on arrays inside a jitted function, under the mesh in use (`jax.set_mesh`).

Dimensions are named as in `axes.LOGICAL_RULES`. Mesh axes of other names, or of size 1, are
ignored.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Shaped

from cem_jax.sharding.axes import LOGICAL_RULES, MESH_AXES, ways


def spec_for(dims: Iterable[str | None], axes: Iterable[str] = MESH_AXES) -> PartitionSpec:
    """Return the partition of an array whose dimensions are named `dims`, over these mesh axes.

    A mesh axis splits at most one dimension: the first that is mapped to it.

    Raises:
      ValueError: a name is not in LOGICAL_RULES.
    """
    free = set(axes)
    parts: list[str | tuple[str, ...] | None] = []
    for dim in dims:
        if dim is not None and dim not in LOGICAL_RULES:
            raise ValueError(f"unknown dimension {dim!r}; known: {', '.join(LOGICAL_RULES)}")
        given = tuple(axis for axis in LOGICAL_RULES.get(dim, ()) if axis in free)
        free.difference_update(given)
        parts.append(given[0] if len(given) == 1 else given or None)
    return PartitionSpec(*parts)


@dataclass(frozen=True)
class Split:
    """The axes of a mesh that split arrays: those with a size above 1, and their sizes."""

    sizes: dict[str, int]

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the axes that split `dim`."""
        return tuple(axis for axis in LOGICAL_RULES[dim] if axis in self.sizes)

    def ways(self, dim: str) -> int:
        """Return the number of parts into which `dim` is split."""
        return ways(self.sizes, dim)

    def spec(self, *dims: str | None) -> PartitionSpec:
        """Return the partition of an array whose dimensions are named `dims`."""
        return spec_for(dims, self.sizes)


def split_in_use() -> Split:
    """Return the split of the mesh set by `jax.set_mesh`, without axes that are already manual."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return Split(
        {
            name: size
            for name, size, kind in axes
            if name in MESH_AXES and size > 1 and kind != AxisType.Manual
        }
    )


def lay_out(x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
    """Constrain `x` to be split according to its dimension names, if the mesh in use splits any.

    Trailing dimensions without a name may be omitted.
    """
    split = split_in_use()
    return lax.with_sharding_constraint(x, split.spec(*dims)) if split else x


@jax.custom_vjp
def whole_rows(weight: Shaped[Array, "F D"]) -> Shaped[Array, "F D"]:
    """Gather a weight of which each device has part of every row; F stays split.

    On its own, XLA would multiply piece by piece while passing the pieces around, and add outputs
    much larger than the weight. The gradient is reduced and split again in one step.
    """
    return _weight_as(weight, None)


def _weight_as(weight, row: str | None):
    return lay_out(weight, "features", row) if split_in_use().axes("embed") else weight


whole_rows.defvjp(
    lambda weight: (whole_rows(weight), None),
    lambda _, bar: (_weight_as(bar, "embed"),),
)

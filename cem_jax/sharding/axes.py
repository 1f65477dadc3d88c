"""The mesh axes, the names of array dimensions, and the one table that maps one to the other.

Code names each dimension of an array by what it is ("embed", "heads", "batch", …). LOGICAL_RULES
says which mesh axes split it, for parameters and activations alike; layouts, divisibility checks
and the kernels' shard_maps all follow from this table. No JAX here: the configuration reads it too.

Mesh axes:
    data       splits batch rows; parameters are copied
    fsdp       splits batch rows too; parameters and optimizer state are split, gathered when used
    tensor     splits heads, MLP width and vocabulary
    context    splits positions

To add an axis, add it here, in `configs/base.py` and in the configuration's `MeshConfig`.
"""

import math
from collections.abc import Mapping

MESH_AXES = ("data", "fsdp", "tensor", "context")

LOGICAL_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),  # B
    "sequence": ("context",),  # J
    "layers": (),  # L
    "embed": ("fsdp",),  # D; not of activations, whose rows have taken fsdp
    "heads": ("tensor",),  # K
    "head_dim": (),  # R
    "mlp": ("tensor",),  # M
    "vocab": ("tensor",),  # V
    "features": ("tensor",),  # rows of any weight: heads × head_dim, mlp or vocab
    "rank": (),  # of the preconditioner's low-rank part
}

# What each device gets of a split dimension, where that is not one part but several: attention
# gives it an early and a late chunk of the positions, which makes causal work equal.
CHUNKS = {"sequence": 2}

# Axes that may cross the slow network between slices of TPUs, in the order of preference.
BETWEEN_SLICES = ("data", "fsdp")

Dims = tuple[str | None, ...]  # one logical name, or None, for each dimension


def ways(sizes: Mapping[str, int], dim: str) -> int:
    """Count the parts into which a mesh of these axis sizes splits the dimension `dim`.

    `sizes` may leave out axes of size 1. `Mesh.shape` is such a mapping.
    """
    return math.prod(sizes.get(axis, 1) for axis in LOGICAL_RULES[dim])

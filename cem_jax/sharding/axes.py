"""The mesh axes, the names of array dimensions, and the one table that maps names to axes.

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
    "embed": ("fsdp",),  # D; only of parameters: in activations the batch takes fsdp
    "heads": ("tensor",),  # K
    "head_dim": (),  # R
    "mlp": ("tensor",),  # M
    "vocab": ("tensor",),  # V
    "features": ("tensor",),  # rows of any weight: heads × head_dim, mlp or vocab
    "rank": (),  # of the preconditioner's low-rank part
}

# Chunks of a split dimension per device, if more than one: attention gives each device an early
# and a late chunk of the positions, which balances causal work.
CHUNKS = {"sequence": 2}

# Axes that may cross the slow network between slices of TPUs, in order of preference.
BETWEEN_SLICES = ("data", "fsdp")

Dims = tuple[str | None, ...]  # one logical name, or None, for each dimension


def ways(sizes: Mapping[str, int], dim: str) -> int:
    """Return the number of parts into which a mesh of these axis sizes splits dimension `dim`.

    `sizes` may leave out axes of size 1. `Mesh.shape` is such a mapping.
    """
    return math.prod(sizes.get(axis, 1) for axis in LOGICAL_RULES[dim])

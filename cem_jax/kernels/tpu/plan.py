"""What is static in a TPU kernel's call: its sizes and blocks, and what VMEM there is.

A resident kernel holds a block of queries, and everything of the keys up to it, in VMEM: its
working set grows with J·D. A streamed one holds a block of either.
"""

from math import ceil, lcm
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from cem_jax.kernels.call import Inputs, Plan

LANES = 128
# Sublanes of a bfloat16 tile; head dims are padded to it where they lie along sublanes.
SUBLANES = 16
DEFAULT_VMEM = 64 * 2**20  # of a device that is not known: the least of v5e, v5p, v6e and TPU7x
# The compiler's own: found 0.6 MiB beyond what is added up here
RESERVED_VMEM = 3 * 2**20


class Sizes(NamedTuple):
    """Static facts of a call. Positions are those of the padded arrays."""

    positions: int  # of the keys
    asking: int  # positions of the queries: as many, or those of one device
    heads: int
    width: int  # R
    rows: int  # R padded to whole tiles
    model: int  # D; 0 without diagonal
    queries: int  # of a query block, a multiple of `keys`
    keys: int
    c: float  # 1/τ
    diagonal: str  # none | shared | per_head
    exact: bool  # with the context a = Σ_k Σ_j p h_j
    values: bool  # values of their own
    slopes: bool
    self_bias: bool
    segments: bool
    dtype: jnp.dtype
    streamed: bool  # keys come a block at a time

    @property
    def precision(self):
        return jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None

    @property
    def ratio(self) -> int:
        """Key blocks of a query block."""
        return self.queries // self.keys

    @property
    def query_blocks(self) -> int:
        return self.asking // self.queries

    @property
    def key_blocks(self) -> int:
        return self.positions // self.keys

    @property
    def sweeps(self) -> int:
        """Over the keys, for each block of queries."""
        return 2 if self.exact else 1

    # A streamed sweep goes through all blocks of keys, the last first: steps beyond the diagonal,
    # which do nothing, then come before those that read, and the first block that is read has its
    # time to arrive.

    def key_block(self, step):
        return self.key_blocks - 1 - step

    def last_key_block(self, i):
        """Seen by query block i of the sequence."""
        return (i + 1) * self.ratio - 1


def sizes_of(inputs: Inputs, plan: Plan, default: tuple[int, int], streamed: bool) -> Sizes:
    """`default`: query and key positions of a block where the plan leaves them open."""
    _, positions, heads, width = inputs.k.shape
    chunk = inputs.q.shape[1] // 2 if inputs.split else None
    queries, keys = plan.blocks or fitted_blocks(positions, default, chunk)
    positions = round_up(positions, lcm(queries, keys))
    diagonal = "none" if inputs.g is None else "shared" if inputs.g.ndim == 3 else "per_head"
    return Sizes(
        positions=positions,
        asking=inputs.q.shape[1] if inputs.split else positions,
        heads=heads,
        width=width,
        rows=round_up(width, SUBLANES),
        model=0 if inputs.h is None else inputs.h.shape[-1],
        queries=queries,
        keys=keys,
        c=1.0 / plan.tau,
        diagonal=diagonal,
        exact=plan.context == "summed",
        values=inputs.v is not None,
        slopes=inputs.slopes is not None,
        self_bias=inputs.self_bias is not None,
        segments=inputs.segments is not None,
        # the matrix unit takes no float16, and bfloat16 has fewer digits
        dtype=jnp.dtype(jnp.bfloat16 if inputs.q.dtype == jnp.bfloat16 else jnp.float32),
        streamed=streamed,
    )


def spilled(sizes: Sizes) -> int:
    """Bytes that the compiler keeps of tiles beside them, in VMEM.

    A float32 product is several of bfloat16, whose parts do not stay in registers: up to 10 tiles
    were found. In bfloat16 there is nothing to speak of.
    """
    return 12 * sizes.queries * sizes.keys * 4 if sizes.dtype == jnp.float32 else 0


def round_up(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple


def fitted_blocks(positions: int, default: tuple[int, int], chunk: int | None) -> tuple[int, int]:
    """The default blocks, halved while they would pad J by more than an eighth.

    Of a `chunk` of the positions, while they do not divide it.
    """
    queries, keys = default
    padded = lambda: 8 * (round_up(positions, queries) - positions) > positions
    while queries > LANES and (chunk % queries if chunk else padded()):
        queries //= 2
    return queries, min(keys, queries)


def vmem_capacity() -> int:
    """Bytes of the device compiled for: the abstract mesh's, or the one at hand."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except Exception:  # raised, in various types, where the device is no TPU or an unknown one
        return DEFAULT_VMEM


def padded_bytes(shape: tuple[int, ...], dtype) -> int:
    """Of an array in VMEM, whose last two axes lie in whole tiles."""
    size = jnp.dtype(dtype).itemsize
    *outer, rows, lanes = (1, *shape) if len(shape) == 1 else shape
    total = round_up(rows, 8 * 4 // size) * round_up(lanes, LANES) * size
    for n in outer:
        total *= n
    return total

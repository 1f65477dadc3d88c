"""The static facts of a TPU kernel's call: its sizes, its blocks, and its arrays' HBM layouts.

A resident kernel holds a query block and all keys up to it in VMEM: its working set grows with J·D.
A streamed kernel holds one block of each. So there are two layouts.

Flat, for the resident kernels: [B, K·R, J] and [B, D, J], positions last. XLA itself lays out a
[B, J, D] of 672 columns this way, which needs no padding, so the transpose moves nothing.

Laid out, for the streamed kernels: the factors of the tiles' products, by head, with k and h in
both orientations. A key block is read once per query block, too often to transpose in the kernel.

    qT, kT, vT, doT [B, K, S, J]   k, v [B, K, J, S]   gT [B, D, J], [B, K, D, J]
    h [B, J, D]   hT, eT [B, D, J]   segment_columns [B, J, L]   S: R in whole tiles, L: 128 lanes

J is padded with zeros to whole blocks: no real query sees a padded key, and a padded query has no
cotangent. No program reads past an array. When positions are split, query arrays hold those of one
device and nothing is padded; segments are whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from cem_jax.kernels.call import BIASES, Call, Chunks, Options, Scores

LANES = 128
F32 = jnp.dtype(jnp.float32)
Index = int | Int[Array, "..."]
# Sublanes of a bfloat16 tile; head dims along sublanes are padded to it.
SUBLANES = 16
DEFAULT_VMEM = 64 * 2**20  # for an unknown device: the least of v5e, v5p, v6e and TPU7x
# The compiler's own use: measured at 0.6 MiB more than the sum computed here
RESERVED_VMEM = 3 * 2**20


class Sizes(NamedTuple):
    """The static facts of a call. Positions are those of the padded arrays."""

    positions: int  # of the keys
    asking: int  # positions of the queries: the same, or those of one device
    heads: int
    width: int  # R
    rows: int  # R padded to whole tiles
    model: int  # D; 0 without diagonal
    queries: int  # per query block, a multiple of `keys`
    keys: int
    c: float  # 1/τ
    diagonal: str  # none | shared | per_head
    average: bool  # with a = Σ_k Σ_j p h_j
    values: bool  # with separate values
    scores: Scores  # which of its arrays are present
    dtype: jnp.dtype
    streamed: bool  # keys arrive one block at a time

    @property
    def precision(self) -> jax.lax.Precision | None:
        return jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None

    @property
    def ratio(self) -> int:
        """Return the number of key blocks per query block."""
        return self.queries // self.keys

    @property
    def query_blocks(self) -> int:
        return self.asking // self.queries

    @property
    def key_blocks(self) -> int:
        return self.positions // self.keys

    @property
    def sweeps(self) -> int:
        """Return the number of sweeps over the keys per query block."""
        return 2 if self.average else 1

    # A streamed sweep visits all key blocks, last first: the idle steps beyond the diagonal come
    # before those that read, which gives the first block time to arrive.

    def key_block(self, step: Index) -> Index:
        return self.key_blocks - 1 - step

    def last_key_block(self, i: Index) -> Index:
        """Return the last key block that query block i of the sequence sees."""
        return (i + 1) * self.ratio - 1


def sizes_of(call: Call, options: Options, default: tuple[int, int], streamed: bool) -> Sizes:
    """Return the sizes of a call; `default`: the blocks if the options do not set them."""
    _, positions, heads, width = call.k.shape
    chunk = call.q.shape[1] // 2 if call.split else None
    queries, keys = options.block_sizes or fitted_blocks(positions, default, chunk)
    positions = round_up(positions, lcm(queries, keys))
    diagonal = "none" if call.g is None else "per_head" if call.per_head else "shared"
    return Sizes(
        positions=positions,
        asking=call.q.shape[1] if call.split else positions,
        heads=heads,
        width=width,
        rows=round_up(width, SUBLANES),
        model=0 if call.h is None else call.h.shape[-1],
        queries=queries,
        keys=keys,
        c=options.c,
        diagonal=diagonal,
        average=options.average == "summed",
        values=call.v is not None,
        scores=Scores(*(x is not None for x in call.scores)),
        # the matrix unit takes no float16, and bfloat16 has fewer digits
        dtype=jnp.dtype(jnp.bfloat16 if call.q.dtype == jnp.bfloat16 else jnp.float32),
        streamed=streamed,
    )


def spilled(sizes: Sizes) -> int:
    """Return the bytes of VMEM that the compiler uses for copies of tiles.

    A float32 product is several bfloat16 ones, whose parts do not stay in registers: up to 10 tiles
    were measured. In bfloat16 it is negligible.
    """
    return 12 * sizes.queries * sizes.keys * 4 if sizes.dtype == jnp.float32 else 0


def round_up(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple


def fitted_blocks(positions: int, default: tuple[int, int], chunk: int | None) -> tuple[int, int]:
    """Return the default blocks, halved while they would pad J by more than an eighth.

    With a `chunk` of the positions, they are halved while they do not divide it.
    """
    queries, keys = default
    padded = lambda: 8 * (round_up(positions, queries) - positions) > positions
    while queries > LANES and (chunk % queries if chunk else padded()):
        queries //= 2
    return queries, min(keys, queries)


def vmem_capacity() -> int:
    """Return the VMEM bytes of the target device: the abstract mesh's, or the local one."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except Exception:  # of various types, if the device is no TPU or is unknown
        return DEFAULT_VMEM


def padded_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Return the bytes of an array in VMEM, its last two axes padded to whole tiles."""
    size = jnp.dtype(dtype).itemsize
    *outer, rows, lanes = (1, *shape) if len(shape) == 1 else shape
    total = round_up(rows, 8 * 4 // size) * round_up(lanes, LANES) * size
    for n in outer:
        total *= n
    return total


class Tables(NamedTuple):
    """Per-row numbers [X] of a streamed kernel; a row is a query block, in sequence order.

    So the keys that earlier rows have seen are the first of those that a row sees.
    """

    block: jax.Array  # offset of its queries in their arrays, in blocks
    place: jax.Array  # their offset in the sequence, in blocks
    seen: jax.Array  # key blocks that earlier rows have seen
    tiles: jax.Array  # of all earlier rows


class Row:
    """The numbers of row `x`, read on demand.

    When positions are split over devices, a device's queries are two chunks of the sequence, and
    only the device knows which. So each block's place in the sequence is read from `tables`, in
    SMEM. For a whole sequence it is known without: a table took 1 % more static cycles.
    """

    def __init__(self, x, tables: Sequence[Tables], sizes: Sizes):
        self.x, self.tables, self.sizes = x, tables, sizes

    def _read(self, name: str, of_whole):
        return getattr(self.tables[0], name)[self.x] if self.tables else of_whole

    @property
    def block(self) -> Index:
        return self._read("block", self.x)

    @property
    def place(self) -> Index:
        return self._read("place", self.x)

    @property
    def seen(self) -> Index:
        return self._read("seen", self.x * self.sizes.ratio)

    @property
    def tiles(self) -> Index:
        return self._read("tiles", self.sizes.ratio * self.x * (self.x + 1) // 2)


def tables_of(chunks: Chunks, sizes: Sizes) -> Tables:
    """Return the tables of this device."""
    tables = (_columns(starts // sizes.queries, sizes) for starts in chunks.blocks(sizes.queries))
    return Tables(*(jnp.asarray(chunks.own(column)) for column in zip(*tables, strict=True)))


def _columns(places: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, ...]:
    """Return the columns of `Tables`, given the `places` of the blocks in array order."""
    block = np.argsort(places).astype(np.int32)
    place = places[block]
    seen = np.concatenate([[0], sizes.last_key_block(place[:-1]) + 1]).astype(np.int32)
    return block, place, seen, np.cumsum(seen, dtype=np.int32)


class Operand(NamedTuple):
    """An array of a call, as it is in HBM, without its batch axis."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    # What a program has of it: a block of positions, along "queries" or "keys", or "all" of a
    # batch element; "sequence": its queries' block of an array of all positions; "scalars" in SMEM;
    # "hbm": nothing, the kernel itself copies blocks of keys.
    part: str = "queries"
    axis: int = -1  # of positions

    def block(self, sizes: Sizes) -> tuple[int, ...]:
        size = dict(queries=sizes.queries, sequence=sizes.queries, keys=sizes.keys, hbm=sizes.keys)
        size = size.get(self.part)
        block = list(self.shape)
        if size is not None:
            block[self.axis] = size
        return tuple(block)

    def vmem(self, sizes: Sizes) -> int:
        """Return the bytes in VMEM: two blocks, for streaming."""
        if self.part in ("scalars", "hbm"):
            return 0
        return 2 * padded_bytes(self.block(sizes), self.dtype)

    def spec(self, sizes: Sizes) -> pl.BlockSpec:
        if self.part == "scalars":
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        if self.part == "hbm":
            return pl.BlockSpec(memory_space=pl.ANY)
        axis = self.axis % len(self.shape)

        def index(b, x, *streamed):
            where = 0 if self.part == "all" else self._place(x, *streamed, sizes=sizes)
            return (b, *(where if n == axis else 0 for n in range(len(self.shape))))

        return pl.BlockSpec((None, *self.block(sizes)), index)

    def _place(self, x, *streamed, sizes: Sizes):
        """Return the index of row x's block; streamed programs have more coordinates."""
        if not streamed:
            return x
        _, step, *tables = streamed
        row = Row(x, tables, sizes)
        if self.part == "queries":
            return row.block
        if self.part == "sequence":
            return row.place
        return jnp.minimum(sizes.key_block(step), sizes.last_key_block(row.place))


def given(sizes: Sizes) -> tuple[str, ...]:
    """Return the names of the inputs that a call has."""
    has = dict(v=sizes.values, g=sizes.model, h=sizes.model)
    return ("q", "k", *(name for name, present in has.items() if present), *scores(sizes))


def scores(sizes: Sizes) -> tuple[str, ...]:
    """Return the names of the biases and ids that a call has."""
    return tuple(name for name, present in sizes.scores._asdict().items() if present)


def gradients(sizes: Sizes) -> tuple[str, ...]:
    """Return the names of the gradients that a call has."""
    return tuple(f"d{name}" for name in given(sizes) if name != "segments")


def flat(name: str, sizes: Sizes) -> Operand:
    """Return an array of the resident kernels by name; a gradient's name is d + its input's."""
    heads, of = sizes.heads, name.removeprefix("d")
    positions = sizes.positions if of in ("k", "v", "h", "segments") else sizes.asking
    if name in BIASES:
        return Operand((heads,), F32, "scalars")
    if of in BIASES:
        return Operand((heads, 1, sizes.queries), F32, "all")
    if name == "segments":
        return Operand((1, positions), jnp.dtype(jnp.int32))
    if name in ("lse", "delta"):
        return Operand((heads, positions), F32)
    rows = heads * sizes.width
    if of in ("h", "a") or (of == "g" and sizes.diagonal == "shared"):
        rows = sizes.model
    elif of == "g":
        rows = heads * sizes.model
    # written once per batch element, after its last query block
    part = "all" if name in ("dk", "dv", "dh") else "queries"
    return Operand((rows, positions), F32 if name in ("o", "a") else sizes.dtype, part)


def laid_out(name: str, sizes: Sizes) -> Operand:
    """Return an array of the streamed kernels by name; `tiles.Refs` has the names."""
    heads, rows, model, positions = sizes.heads, sizes.rows, sizes.model, sizes.positions
    dtype, asking = sizes.dtype, sizes.asking
    gT = (model, asking) if sizes.diagonal == "shared" else (heads, model, asking)
    known = dict(
        qT=Operand((heads, rows, asking), dtype),
        doT=Operand((heads, rows, asking), dtype),
        gT=Operand(gT, dtype),
        eT=Operand((model, asking), dtype),
        k=Operand((heads, positions, rows), dtype, "keys", 1),
        kT=Operand((heads, rows, positions), dtype, "keys"),
        h=Operand((positions, model), dtype, "keys", 0),
        hT=Operand((model, positions), dtype, "keys"),
        segments=Operand((1, positions), jnp.dtype(jnp.int32), "sequence"),
        segment_columns=Operand((positions, LANES), jnp.dtype(jnp.int32), "keys", 0),
        dk=Operand((heads, rows, positions), F32, "hbm"),
        dh=Operand((model, positions), F32, "hbm"),
    )
    known |= dict(v=known["k"], vT=known["kT"], dv=known["dk"])
    return known[name] if name in known else flat(name, sizes)


def resident(names: Sequence[str], sizes: Sizes) -> dict[str, tuple]:
    """Return (shape, dtype) of what a resident kernel lays out itself: all keys, some queries.

    A g shared by the heads is read in place.
    """
    found = {name: laid_out(name, sizes) for name in names}
    return {
        name: (x.block(sizes) if x.part == "queries" else x.shape, x.dtype)
        for name, x in found.items()
        if name != "gT" or sizes.diagonal == "per_head"
    }


def arrange(
    name: str, arrays: dict[str, jax.Array], operand: Operand, sizes: Sizes
) -> Shaped[Array, "B *S"]:
    """Return the named array of a call, given `arrays`: [B, J, …], [B, K, J], [B, J]."""
    if name in BIASES:
        return arrays[name].astype(operand.dtype)
    if name in ("lse", "delta"):
        return _padded(arrays[name], -1, operand)
    source = dict(doT="do", eT="da", segment_columns="segments")
    x = _padded(arrays[source.get(name, name.removesuffix("T"))], 1, operand)
    x = x.astype(operand.dtype)
    if name == "segments":
        return x[:, None]
    if name == "segment_columns":
        return jnp.broadcast_to(x[..., None], (*x.shape, LANES))
    if len(operand.shape) == 2:
        x = x.reshape(*x.shape[:2], -1)  # [B, J, ·]
        return x if operand.axis == 0 else jnp.swapaxes(x, 1, 2)
    columns = operand.shape[1 if operand.axis == -1 else 2]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, columns - x.shape[-1])))
    return x.transpose((0, 2, 3, 1) if operand.axis == -1 else (0, 2, 1, 3))


def restore(x: Float[Array, "B *S J"], shape: tuple[int, ...]) -> Float[Array, "B J *S"]:
    """Return an output [B, ·, J], or [B, K, S, J], as an array of `shape` [B, J, …]."""
    if x.ndim == 4:
        x = x[:, :, : shape[-1]].reshape(x.shape[0], -1, x.shape[-1])
    return jnp.swapaxes(x, 1, 2)[:, : shape[1]].reshape(shape)


def _padded(x, axis: int, operand: Operand):
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, operand.shape[operand.axis] - x.shape[axis])
    return jnp.pad(x, missing) if missing[axis][1] else x


@dataclass(frozen=True)
class Kernel:
    """One kernel: what it computes, and how it is called."""

    name: str  # in profiles and dumps
    body: Callable[["Program", Sizes], None]
    arrays: Callable[[Sizes], tuple[tuple[str, ...], tuple[str, ...]]]  # names: inputs, outputs
    operand: Callable[[str, Sizes], "Operand"]  # the layout of a named array
    scratch: Callable[[Sizes], dict[str, tuple]]  # (shape, dtype) of its scratch in VMEM
    streamed: bool  # one key block per grid step
    blocks: tuple[tuple[int, int], ...]  # (query, key) positions to try, best first
    heads_together: int  # visited at a time, for the scheduler to interleave


class Program(NamedTuple):
    """The operands of one program of a kernel: references by name, a `tiles.Refs` each."""

    inputs: Any
    outputs: Any
    kept: Any  # scratch
    tables: Sequence["Tables"]  # one if positions are split
    copied: dict[str, Any]  # semaphores of the outputs that the kernel copies itself

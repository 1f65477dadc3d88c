"""What is static in a TPU kernel's call: its sizes, its blocks, and how its arrays lie in HBM.

A resident kernel holds a block of queries, and everything of the keys up to it, in VMEM: its
working set grows with J·D. A streamed one holds a block of either. So there are two layouts.

Flat, for the resident kernels: [B, K·R, J] and [B, D, J], positions last. XLA itself lays a
[B, J, D] of 672 columns out so, since nothing is padded then, and the transpose moves nothing.

Laid out, for the streamed ones: what the tiles multiply, by head and, of k and h, both ways round.
A block of keys comes by once for every block of queries, too often to be turned in the kernel.

    qT, kT, vT, doT [B, K, S, J]   k, v [B, K, J, S]   gT [B, D, J], [B, K, D, J]
    h [B, J, D]   hT, eT [B, D, J]   segment_columns [B, J, L]   S: R in whole tiles, L: 128 lanes

J is padded with zeros to whole blocks: no real query sees a padded key, and a padded query has no
cotangent. No program reads past an array. Where positions are split, arrays of queries have those
of one device, and nothing is padded; segments are whole.
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
    average: bool  # with a = Σ_k Σ_j p h_j
    values: bool  # values of their own
    scores: Scores  # which of its arrays there are
    dtype: jnp.dtype
    streamed: bool  # keys come a block at a time

    @property
    def precision(self) -> jax.lax.Precision | None:
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
        return 2 if self.average else 1

    # A streamed sweep goes through all blocks of keys, the last first: steps beyond the diagonal,
    # which do nothing, then come before those that read, and the first block that is read has its
    # time to arrive.

    def key_block(self, step: Index) -> Index:
        return self.key_blocks - 1 - step

    def last_key_block(self, i: Index) -> Index:
        """Return the last key block that query block i of the sequence sees."""
        return (i + 1) * self.ratio - 1


def sizes_of(call: Call, options: Options, default: tuple[int, int], streamed: bool) -> Sizes:
    """Return the sizes of a call; `default`: its blocks where the options leave them open."""
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


def padded_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Of an array in VMEM, whose last two axes lie in whole tiles."""
    size = jnp.dtype(dtype).itemsize
    *outer, rows, lanes = (1, *shape) if len(shape) == 1 else shape
    total = round_up(rows, 8 * 4 // size) * round_up(lanes, LANES) * size
    for n in outer:
        total *= n
    return total


class Tables(NamedTuple):
    """Numbers of a streamed kernel's rows, each a block of queries, in sequence order. [X].

    So of the keys that a row sees, those that rows before it have seen are the first.
    """

    block: jax.Array  # where its queries lie in their arrays, in blocks
    place: jax.Array  # where they are in the sequence, in blocks
    seen: jax.Array  # blocks of keys that rows before it have seen
    tiles: jax.Array  # of all rows before it


class Row:
    """The numbers of row `x`, read when they are asked for.

    Where positions are split over devices, a device's queries are two chunks of the sequence, and
    only the device knows which. So where each block is in the sequence comes in `tables`, in SMEM.
    Of a whole sequence it is known, and there is no table: reading it took 1 % more static cycles.
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
    """Return the tables of the device at work."""
    tables = (_columns(starts // sizes.queries, sizes) for starts in chunks.blocks(sizes.queries))
    return Tables(*(jnp.asarray(chunks.own(column)) for column in zip(*tables, strict=True)))


def _columns(places: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, ...]:
    """`places`: of the blocks as they lie in the arrays."""
    block = np.argsort(places).astype(np.int32)
    place = places[block]
    seen = np.concatenate([[0], sizes.last_key_block(place[:-1]) + 1]).astype(np.int32)
    return block, place, seen, np.cumsum(seen, dtype=np.int32)


class Operand(NamedTuple):
    """An array of a call, as in HBM without its batch axis."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    # What a program has of it: a block of positions, along "queries" or "keys", or "all" of a
    # batch element; "sequence": its queries' block of an array of all positions; "scalars" in SMEM;
    # "hbm": nothing, the kernel itself copies blocks of keys.
    part: str = "queries"
    axis: int = -1  # of its positions

    def block(self, sizes: Sizes) -> tuple[int, ...]:
        size = dict(queries=sizes.queries, sequence=sizes.queries, keys=sizes.keys, hbm=sizes.keys)
        size = size.get(self.part)
        block = list(self.shape)
        if size is not None:
            block[self.axis] = size
        return tuple(block)

    def vmem(self, sizes: Sizes) -> int:
        """Bytes: a block twice, to stream it."""
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
        """Of the block that the programs of row x have; streamed ones have more coordinates."""
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
    """Return an array of the resident kernels by name; a gradient's is d… of its input's."""
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
    # written once a batch element, after its last block of queries
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

    A g that the heads share is read where it comes in.
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
    """Return the array of a call from `arrays` by name: [B, J, …], [B, K, J], [B, J]."""
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
    operand: Callable[[str, Sizes], "Operand"]  # how the array of a name lies
    scratch: Callable[[Sizes], dict[str, tuple]]  # (shape, dtype) of what it keeps in VMEM
    streamed: bool  # keys come a block per grid step
    blocks: tuple[tuple[int, int], ...]  # (query, key) positions to try, best first
    heads_together: int  # visited at a time, for the scheduler to interleave


class Program(NamedTuple):
    """What one program of a kernel works on: references by name, a `tiles.Refs` each."""

    inputs: Any
    outputs: Any
    kept: Any  # scratch
    tables: Sequence["Tables"]  # one where positions are split
    copied: dict[str, Any]  # semaphores of the outputs that the kernel itself copies

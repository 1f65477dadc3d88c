"""Shared parts of the GPU kernels: operands in memory, and one tile of scores.

Everything is read in place: q [B, J, K, R] by position, head and lane, with no transposed or padded
copy. A head dim that is not a power of two is read in two pieces, 84 as 64 + 32 lanes, with the
last lanes masked. A partial last block is masked when it is read, so memory past the array has no
influence.

Scores are in base 2. A tile holds t = s·log2(e) − offset, with one `offset` per query: ALiBi
is m_k(j − j0) inside a tile that starts at key j0, so its magnitude does not grow with J.

Shapes: B batch · J positions · P positions padded to whole squares · K heads · R head dim ·
I, N positions of a query and a key block · L lanes of a piece.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, Shaped

from cem_jax.kernels.call import BIASES, Scores

LOG2E = 1.4426950408889634
# Head-shared tiles are written and read by squares of this many positions on or below the diagonal.
SQUARE = 128
SMALLEST = 16  # positions or lanes of one matrix instruction
_HIDDEN = -1e30  # finite: a row's running maximum may be over hidden scores only

Ref = Any  # a reference into memory; Pallas has no public type of it
Index = int | Int[Array, ""]
Pieces = tuple[Float[Array, "I L"], ...]  # a head's lanes, piece by piece
InTile = Float[Array, "I N"] | Float[Array, "N I"]


class Operands(NamedTuple):
    """Arrays that a kernel reads, or references to them inside the kernel."""

    q: Any = None  # [B, J, K, R]
    k: Any = None  # [B, J, K, R]
    v: Any = None  # [B, J, K, R]; None: the keys
    do: Any = None  # [B, J, K, R]
    shared: Any = None  # log2(e)·c·g_i·h_j, shared by all heads [B, P, P]
    cross: Any = None  # E = e_i·h_j, added to dP by the average of h [B, P, P]
    lse: Any = None  # log2(e)·lse [B, K, J]
    delta: Any = None  # c·Δ [B, K, J]
    scores: Scores = Scores()


class Task(NamedTuple):
    """The static options of a kernel."""

    positions: int
    heads: int
    width: int  # head dim
    c: float  # 1/τ
    queries: int
    keys: int
    warps: int
    stages: int
    interpret: bool

    @property
    def padded(self) -> int:
        return padded_positions(self.positions)

    @property
    def ragged(self) -> bool:
        return self.padded != self.positions


class Tile(NamedTuple):
    """A tile of one head: queries i0 … against keys j0 …, [I, N], or [N, I] with `keys_first`."""

    head: Any
    i0: Any
    j0: Any
    edge: bool  # whether it reaches the diagonal
    keys_first: bool
    shared: Any  # its parts of `Operands.shared` and `Operands.cross`, in float32
    cross: Any


class Rows(NamedTuple):
    """A block of queries of one head, read for the backward pass."""

    q: tuple
    do: tuple
    lse_I: Any
    delta_I: Any


class Output(NamedTuple):
    """An array that a kernel writes, and the part that each program writes."""

    shape: jax.ShapeDtypeStruct
    spec: pl.BlockSpec


class Piece(NamedTuple):
    """A range of a head's lanes that is read together."""

    start: int
    size: int  # a power of two
    used: int


def square(positions: int) -> int:
    """Return the side of a square in positions: less than SQUARE only for short sequences."""
    return min(SQUARE, max(SMALLEST, pl.next_power_of_2(positions)))


def padded_positions(positions: int) -> int:
    return pl.cdiv(positions, square(positions)) * square(positions)


def pieces(width: int) -> tuple[Piece, ...]:
    """Split a head dim into one power of two, or two if that reads fewer lanes."""
    whole = max(SMALLEST, pl.next_power_of_2(width))
    first = whole // 2
    rest = max(SMALLEST, pl.next_power_of_2(max(1, width - first)))
    if first + rest >= whole or first < SMALLEST:
        return (Piece(0, whole, width),)
    return Piece(0, first, first), Piece(first, rest, width - first)


def lanes(width: int) -> int:
    """Return the number of lanes read per head."""
    last = pieces(width)[-1]
    return last.start + last.size


# Calling a kernel


def launch(
    kernel: Callable,
    operands: Operands,
    grid: tuple[int, ...],
    outputs: Any,
    task: Task,
    name: str,
) -> Any:
    """Run `kernel(refs: Operands, output refs, task)` over `grid`, whose first axis varies fastest.

    The batch is the last axis of the grid. `outputs` is a tree of `Output`; the result has the same
    structure.
    """
    each = lambda f: jax.tree.map(f, outputs, is_leaf=lambda x: isinstance(x, Output))

    def body(refs, out_refs):
        kernel(refs, out_refs, task)

    body.__name__ = name
    [found] = pl.pallas_call(
        body,
        grid=grid,
        in_specs=(_whole(operands, task),),
        out_specs=(each(lambda x: x.spec),),
        out_shape=(each(lambda x: x.shape),),
        compiler_params=triton.CompilerParams(num_warps=task.warps, num_stages=task.stages),
        interpret=task.interpret,
        name=name,
    )(operands)
    return found


def _whole(operands: Operands, task: Task) -> Operands:
    """Return a spec per array that covers one batch element; a program reads its own part."""
    of_head = _spec(None, task.padded, task.heads, lanes(task.width))
    of_pairs = _spec(None, task.padded, task.padded)
    of_rows = _spec(None, task.heads, task.padded)
    specs = Operands(
        q=of_head,
        k=of_head,
        v=of_head,
        do=of_head,
        shared=of_pairs,
        cross=of_pairs,
        lse=of_rows,
        delta=of_rows,
        scores=Scores(
            **dict.fromkeys(BIASES, _spec(task.heads)), segments=_spec(None, task.padded)
        ),
    )
    absent = lambda x: x is None
    return jax.tree.map(
        lambda x, spec: None if x is None else spec, operands, specs, is_leaf=absent
    )


def _spec(*shape: int | None) -> pl.BlockSpec:
    rest = (0,) * (len(shape) - 1)
    batched = shape[0] is None
    return pl.BlockSpec(shape, lambda *program: (program[-1] if batched else 0, *rest))


# Reading and writing


def read_head(ref: Ref, start: Index, size: int, head: Index, task: Task) -> Pieces:
    """Read positions `start` … of one head, [size, L] per piece, with 0 out of bounds."""
    return tuple(
        _read(
            ref.at[pl.ds(start, size), head, pl.ds(piece.start, piece.size)],
            _both(
                _within(start, size, task, ndim=2),
                None if piece.used == piece.size else counting(piece.size)[None] < piece.used,
            ),
            0.0,
        )
        for piece in pieces(task.width)
    )


def read_rows(
    ref: Ref, start: Index, size: int, head: Index, task: Task, other: float = 0.0
) -> Float[Array, " I"]:
    """Read one number per position of one head, for `size` positions from `start` on."""
    return _read(ref.at[head, pl.ds(start, size)], _within(start, size, task, ndim=1), other)


def read_lse(refs: Operands, start: Index, head: Index, task: Task) -> Float[Array, " I"]:
    """Read log2(e)·lse; ∞ for a padded query, whose probabilities are then 0."""
    return read_rows(refs.lse, start, task.queries, head, task, jnp.inf)


def _read(ref, mask, other):
    return ref[...] if mask is None else triton.load(ref, mask=mask, other=other)


def _within(start, size: int, task: Task, ndim: int):
    if not task.ragged:
        return None
    inside = start + counting(size) < task.positions
    return inside[:, None] if ndim == 2 else inside


def _both(rows, columns):
    if rows is None or columns is None:
        return columns if rows is None else rows
    return rows & columns


def write_head(ref: Ref, values: Pieces, task: Task) -> None:
    """Write [I, L] per piece into a block of one head, except padded lanes."""
    for piece, value in zip(pieces(task.width), values, strict=True):
        target = ref.at[:, pl.ds(piece.start, piece.size)]
        value = value.astype(ref.dtype)
        if piece.used == piece.size:
            target[...] = value
        else:
            triton.store(target, value, mask=counting(piece.size)[None] < piece.used)


def head_block(task: Task, size: int, number: Callable) -> pl.BlockSpec:
    """Return the spec of block `number(block)` of one head, for programs (head, block, batch)."""
    return pl.BlockSpec((None, size, None, lanes(task.width)), lambda k, x, b: (b, number(x), k, 0))


def row_block(size: int, number: Callable) -> pl.BlockSpec:
    """Return the spec of `size` positions of one head of an array [B, K, J]."""
    return pl.BlockSpec((None, None, size), lambda k, x, b: (b, k, number(x)))


# Arithmetic


def dot(
    a: Float[Array, "M K"], b: Float[Array, "#K #N"], *, transposed: bool = False
) -> Float[Array, "M N"]:
    """Return a b, or a bᵀ, summed in float32; float32 factors are not rounded."""
    precise = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=precise,
        preferred_element_type=jnp.float32,
    )


def multiply_add(x: InTile, factor: float, y: InTile, task: Task) -> InTile:
    """Return factor·x + y in one instruction; Triton would not fuse the two."""
    if task.interpret:
        return factor * x + y
    factor = jnp.full(x.shape, factor, jnp.float32)
    return _instruct("fma.rn.f32 $0, $1, $2, $3;", (x, factor, jnp.broadcast_to(y, x.shape)))


def exp2(x: Float[Array, "..."], task: Task) -> Float[Array, "..."]:
    """Return 2^x in one instruction: the exact version takes three more for subnormal results."""
    if task.interpret:
        return jnp.exp2(x)
    return _instruct("ex2.approx.ftz.f32 $0, $1;", (x,))


def _instruct(assembly: str, arguments: Sequence):
    [result] = triton.elementwise_inline_asm(
        assembly,
        args=list(arguments),
        constraints=",".join(["=f"] + ["f"] * len(arguments)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arguments[0].shape, jnp.float32)],
    )
    return result


def dot_heads(a: Pieces, b: Pieces) -> InTile:
    """Return a bᵀ summed over the pieces."""
    total = dot(a[0], b[0], transposed=True)
    for x, y in zip(a[1:], b[1:], strict=True):
        total += dot(x, y, transposed=True)
    return total


def accumulate(sums: Pieces, weights: InTile, values: Pieces) -> Pieces:
    """Return sums + weights·values, piece by piece."""
    return tuple(s + dot(weights, x) for s, x in zip(sums, values, strict=True))


def zeros(size: int, task: Task) -> Pieces:
    return tuple(jnp.zeros((size, piece.size), jnp.float32) for piece in pieces(task.width))


def tile_at(
    refs: Operands,
    head: Index | None,
    i0: Index,
    j0: Index,
    task: Task,
    *,
    edge: bool,
    keys_first: bool = False,
) -> Tile:
    """Return the tile of queries i0 … and keys j0 …, with its parts of the head-shared arrays."""
    part = lambda ref: None if ref is None else shared_tile(ref, i0, j0, task, keys_first)
    return Tile(head, i0, j0, edge, keys_first, part(refs.shared), part(refs.cross))


def shared_tile(ref: Ref, i0: Index, j0: Index, task: Task, keys_first: bool) -> InTile:
    """Return a tile of a head-shared array, in float32."""
    tile = ref[pl.ds(i0, task.queries), pl.ds(j0, task.keys)]
    return (tile.T if keys_first else tile).astype(jnp.float32)


def over_queries(x: Shaped[Array, " I"], keys_first: bool) -> Shaped[Array, "A C"]:
    """Reshape one number per query to broadcast over a tile's keys."""
    return x[None] if keys_first else x[:, None]


def over_keys(x: Shaped[Array, " N"], keys_first: bool) -> Shaped[Array, "A C"]:
    """Reshape one number per key to broadcast over a tile's queries."""
    return x[:, None] if keys_first else x[None]


def scores(refs: Operands, qk: InTile, tile: Tile, task: Task) -> tuple[InTile, Float[Array, " I"]]:
    """Return (t, offset): s·log2(e) = t + offset.

    `qk`: the products of queries and keys.
    """
    keys_first, biases = tile.keys_first, refs.scores
    scale = task.c * LOG2E
    t = scale * qk if tile.shared is None else multiply_add(qk, scale, tile.shared, task)
    i, j = counting(task.queries), counting(task.keys)
    offset = jnp.zeros((task.queries,), jnp.float32)
    if biases.slopes is not None:
        slope = biases.slopes[tile.head] * LOG2E
        t += over_keys(slope * j.astype(jnp.float32), keys_first)
        offset = slope * (tile.j0 - tile.i0).astype(jnp.float32) - slope * i.astype(jnp.float32)
    query, key = over_queries(tile.i0 + i, keys_first), over_keys(tile.j0 + j, keys_first)
    if tile.edge and biases.self_bias is not None:
        t = jnp.where(query == key, t + biases.self_bias[tile.head] * LOG2E, t)
    visible = query >= key if tile.edge else None
    if biases.segments is not None:
        own = read_segments(refs, tile.i0, task.queries, task)
        other = read_segments(refs, tile.j0, task.keys, task)
        same = over_queries(own, keys_first) == over_keys(other, keys_first)
        visible = same if visible is None else visible & same
    return (t if visible is None else jnp.where(visible, t, _HIDDEN)), offset


def probabilities(
    refs: Operands, qk: InTile, lse_I: Float[Array, " I"], tile: Tile, task: Task
) -> InTile:
    """Return exp(s − lse) of a tile; `qk` is as in `scores`."""
    t, offset_I = scores(refs, qk, tile, task)
    return exp2(t - over_queries(lse_I - offset_I, tile.keys_first), task)


def add_bias_gradients(
    refs: Operands, sums: Scores, tile: Tile, ds_NI: Float[Array, "N I"], task: Task
) -> Scores:
    """Return `sums` [N] plus Σ_i (i − j) c·dS and the c·dS of i = j, keys first."""
    if refs.scores.slopes is not None:
        far_N = _distances(ds_NI.astype(refs.q.dtype), tile.i0 - tile.j0)
        sums = sums._replace(slopes=sums.slopes + far_N)
    if refs.scores.self_bias is not None and tile.edge:
        i, j = tile.i0 + counting(task.queries), tile.j0 + counting(task.keys)
        own_N = jnp.where(i[None] == j[:, None], ds_NI, 0.0).sum(1)
        sums = sums._replace(self_bias=sums.self_bias + own_N)
    return sums


def bias_gradients(sums: Scores, task: Task) -> Scores:
    """Return the gradients of the biases from the sums of `add_bias_gradients`, [B, K, J]."""
    total = lambda x: None if x is None else x.sum((0, 2)) / task.c
    slopes = total(sums.slopes)
    return Scores(slopes=None if slopes is None else -slopes, self_bias=total(sums.self_bias))


def _distances(ds_NI, ahead):
    """Return Σ_i (i − j) dS, [N], of a tile whose queries start `ahead` of its keys.

    Both sums it needs, of dS and of dS times the position in the block, are one matrix
    instruction: these positions are exact in low precision, and the vector units are busier.
    """
    keys, queries = ds_NI.shape
    i_I1, column_1M = counting(queries)[:, None], counting(SMALLEST)[None]
    weights_IM = jnp.where(column_1M == 0, i_I1, jnp.where(column_1M == 1, 1, 0))
    sums_NM = dot(ds_NI, weights_IM.astype(ds_NI.dtype))
    shift_N1 = (ahead - counting(keys)).astype(jnp.float32)[:, None]
    shift_NM = jnp.where(column_1M == 0, 1.0, jnp.where(column_1M == 1, shift_N1, 0.0))
    return (sums_NM * shift_NM).sum(1)


def read_rows_of(refs: Operands, start: Index, head: Index, task: Task) -> Rows:
    """Read the queries of one head from `start` on."""
    return Rows(
        read_head(refs.q, start, task.queries, head, task),
        read_head(refs.do, start, task.queries, head, task),
        read_lse(refs, start, head, task),
        read_rows(refs.delta, start, task.queries, head, task),
    )


def read_keys(refs: Operands, start: Index, head: Index, task: Task) -> tuple[Pieces, Pieces]:
    """Read k and v of one head from key `start` on."""
    k = read_head(refs.k, start, task.keys, head, task)
    return k, k if refs.v is None else read_head(refs.v, start, task.keys, head, task)


def read_segments(refs: Operands, start: Index, size: int, task: Task) -> Int[Array, " I"]:
    """Read the document ids of the positions from `start` on."""
    return _read(refs.scores.segments.at[pl.ds(start, size)], _within(start, size, task, ndim=1), 0)


def keys_of(i0: Index, task: Task) -> tuple[Index, Index]:
    """Return the key blocks of the queries from i0 on: (first at the diagonal, end)."""
    first = _divided(i0, task.keys)
    end = _divided(i0 + task.queries + task.keys - 1, task.keys)
    return first, jnp.minimum(end, pl.cdiv(task.positions, task.keys))


def queries_of(j0: Index, task: Task) -> tuple[Index, Index, Index]:
    """Return the query blocks of the keys from j0 on: (first, first below the diagonal, end)."""
    first = _divided(j0, task.queries)
    below = _divided(j0 + task.keys + task.queries - 2, task.queries)
    end = pl.cdiv(task.positions, task.queries)
    return first, jnp.minimum(below, end), jnp.int32(end)


def _divided(x, size: int):
    """Return x // size for a nonnegative x."""
    return lax.div(x, jnp.int32(size))


def sweep(visit: Callable, start: Any, full: tuple, edge: tuple, edge_first: bool = False) -> Any:
    """Run `visit(block, carry, edge)` over two ranges of blocks; `edge` is at the diagonal."""
    run = lambda bounds, at_edge, carry: lax.fori_loop(
        *bounds, lambda block, carry: visit(block, carry, at_edge), carry
    )
    if edge_first:
        return run(full, False, run(edge, True, start))
    return run(edge, True, run(full, False, start))


def counting(size: int) -> Int[Array, " I"]:
    """Return 0 … size − 1."""
    return jnp.arange(size, dtype=jnp.int32)

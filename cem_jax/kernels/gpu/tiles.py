"""What the GPU kernels share: their operands in memory, and one tile of scores.

Everything is read where it lies: q [B, J, K, R] by position, head and lane, with no transposed or
padded copy. A head dim that is no power of two is read in two pieces, 84 as 64 + 32 lanes, the last
ones masked. A last block that is not full is masked where it is read, so that what lies behind the
array cannot matter.

Scores are in base 2. A tile holds t = s·log2(e) − offset, `offset` a number for each query: ALiBi
is m_k(j − j0) inside a tile that starts at key j0, so its magnitude does not grow with J.

Shapes: B batch · J positions · P positions padded to whole squares · K heads · R head dim ·
I, N positions of a query and of a key block · L lanes of a piece.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

LOG2E = 1.4426950408889634
# Head-shared tiles are written and read by squares of this many positions on or below the diagonal.
SQUARE = 128
SMALLEST = 16  # positions or lanes of one matrix instruction
_HIDDEN = -1e30  # finite: a row's running maximum may be of hidden scores alone


class Operands(NamedTuple):
    """Arrays that a kernel reads, or the references to them inside it."""

    q: Any = None  # [B, J, K, R]
    k: Any = None  # [B, J, K, R]
    v: Any = None  # [B, J, K, R]; None: the keys
    do: Any = None  # [B, J, K, R]
    tile: Any = None  # log2(e)·c·g_i·h_j, shared by the heads [B, P, P]
    extra: Any = None  # E = e_i·h_j, what the context adds to dP [B, P, P]
    lse: Any = None  # log2(e)·lse [B, K, J]
    delta: Any = None  # c·Δ [B, K, J]
    slopes: Any = None  # [K]
    self_bias: Any = None  # [K]
    segments: Any = None  # [B, J]


class Task(NamedTuple):
    """What is static in a kernel."""

    positions: int
    heads: int
    width: int  # of a head
    scale: float  # c = 1/τ
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


class Piece(NamedTuple):
    """Lanes of a head that are read together."""

    start: int
    size: int  # a power of two
    used: int


def square(positions: int) -> int:
    """Positions of a square: fewer than SQUARE only where there are fewer."""
    return min(SQUARE, max(SMALLEST, pl.next_power_of_2(positions)))


def padded_positions(positions: int) -> int:
    return pl.cdiv(positions, square(positions)) * square(positions)


def pieces(width: int) -> tuple[Piece, ...]:
    """One power of two, or two where that reads fewer lanes."""
    whole = max(SMALLEST, pl.next_power_of_2(width))
    first = whole // 2
    rest = max(SMALLEST, pl.next_power_of_2(max(1, width - first)))
    if first + rest >= whole or first < SMALLEST:
        return (Piece(0, whole, width),)
    return Piece(0, first, first), Piece(first, rest, width - first)


def lanes(width: int) -> int:
    """Lanes that a head is read as."""
    last = pieces(width)[-1]
    return last.start + last.size


# Calling a kernel


def launch(kernel, operands: Operands, grid, outputs: Sequence, task: Task, name: str):
    """`kernel(refs: Operands, *output refs, task)` over `grid`, whose first axis runs fastest.

    The batch is the last axis of the grid. `outputs`: (shape and dtype, BlockSpec) each.
    """

    def body(refs, *out_refs):
        kernel(refs, *out_refs, task=task)

    body.__name__ = name
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=(_whole(operands, task),),
        out_specs=tuple(spec for _, spec in outputs),
        out_shape=tuple(shape for shape, _ in outputs),
        compiler_params=triton.CompilerParams(num_warps=task.warps, num_stages=task.stages),
        interpret=task.interpret,
        name=name,
    )(operands)


def _whole(operands: Operands, task: Task) -> Operands:
    """Each array as all that belongs to one batch element; a program reads its own part."""
    of_head = (None, task.padded, task.heads, lanes(task.width))
    shapes = dict.fromkeys(("q", "k", "v", "do"), of_head)
    shapes |= dict.fromkeys(("tile", "extra"), (None, task.padded, task.padded))
    shapes |= dict.fromkeys(("lse", "delta"), (None, task.heads, task.padded))
    shapes |= dict.fromkeys(("slopes", "self_bias"), (task.heads,))
    shapes["segments"] = (None, task.padded)
    return Operands(
        **{
            name: None if x is None else _spec(shapes[name])
            for name, x in operands._asdict().items()
        }
    )


def _spec(shape) -> pl.BlockSpec:
    rest = (0,) * (len(shape) - 1)
    batched = shape[0] is None
    return pl.BlockSpec(shape, lambda *program: (program[-1] if batched else 0, *rest))


# Reading and writing


def read_head(ref, start, size: int, head, task: Task) -> tuple:
    """Positions `start` … of one head, a [size, L] array a piece; 0 where there is nothing."""
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


def read_rows(ref, start, size: int, head, task: Task, other=0.0):
    """A number for each of the positions `start` … of one head. [size]."""
    return _read(ref.at[head, pl.ds(start, size)], _within(start, size, task, ndim=1), other)


def read_lse(refs: Operands, start, head, task: Task):
    """log2(e)·lse; ∞ for a query that padding added, whose probabilities are then 0. [I]."""
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


def write_head(ref, values: Sequence, task: Task) -> None:
    """A [I, L] array a piece into a block of one head; the last lanes of it are not written."""
    for piece, value in zip(pieces(task.width), values, strict=True):
        target = ref.at[:, pl.ds(piece.start, piece.size)]
        value = value.astype(ref.dtype)
        if piece.used == piece.size:
            target[...] = value
        else:
            triton.store(target, value, mask=counting(piece.size)[None] < piece.used)


def head_block(task: Task, size: int, number) -> pl.BlockSpec:
    """Block `number(block)` of `size` positions of one head, for programs (head, block, batch)."""
    return pl.BlockSpec((None, size, None, lanes(task.width)), lambda k, x, b: (b, number(x), k, 0))


def row_block(size: int, number) -> pl.BlockSpec:
    """The same of an array [B, K, J]."""
    return pl.BlockSpec((None, None, size), lambda k, x, b: (b, k, number(x)))


# Arithmetic


def dot(a, b, *, transposed=False):
    """a b, or a bᵀ, summed in float32; float32 factors are not rounded."""
    precise = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=precise,
        preferred_element_type=jnp.float32,
    )


def multiply_add(x, factor: float, y, task: Task):
    """factor·x + y in one instruction, which Triton would not contract."""
    if task.interpret:
        return factor * x + y
    factor = jnp.full(x.shape, factor, jnp.float32)
    return _instruct("fma.rn.f32 $0, $1, $2, $3;", (x, factor, jnp.broadcast_to(y, x.shape)))


def exp2(x, task: Task):
    """2^x in one instruction: the exact one treats subnormal results in three more."""
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


def dot_heads(a: Sequence, b: Sequence):
    """Σ over the pieces of a bᵀ."""
    total = dot(a[0], b[0], transposed=True)
    for x, y in zip(a[1:], b[1:], strict=True):
        total += dot(x, y, transposed=True)
    return total


def accumulate(sums: Sequence, weights, values: Sequence) -> tuple:
    """sums + weights·values, piece by piece."""
    return tuple(s + dot(weights, x) for s, x in zip(sums, values, strict=True))


def zeros(size: int, task: Task) -> tuple:
    return tuple(jnp.zeros((size, piece.size), jnp.float32) for piece in pieces(task.width))


def shared_tile(ref, i0, j0, task: Task, keys_first: bool):
    """A tile of a head-shared array, in float32. [I, N], or [N, I]."""
    tile = ref[pl.ds(i0, task.queries), pl.ds(j0, task.keys)]
    return (tile.T if keys_first else tile).astype(jnp.float32)


def over_queries(x, keys_first: bool):
    """A number for each query of a tile, to be broadcast over the keys."""
    return x[None] if keys_first else x[:, None]


def over_keys(x, keys_first: bool):
    return x[:, None] if keys_first else x[None]


def scores(refs: Operands, qk, tile, head, i0, j0, task: Task, *, edge: bool, keys_first=False):
    """(t, offset): s·log2(e) = t + offset, offset [I]. t [I, N], or [N, I] with `keys_first`.

    `qk` are the products of queries and keys, `tile` is what the heads share. `edge`: whether the
    tile reaches the diagonal.
    """
    scale = task.scale * LOG2E
    t = scale * qk if tile is None else multiply_add(qk, scale, tile, task)
    i, j = counting(task.queries), counting(task.keys)
    offset = jnp.zeros((task.queries,), jnp.float32)
    if refs.slopes is not None:
        slope = refs.slopes[head] * LOG2E
        t += over_keys(slope * j.astype(jnp.float32), keys_first)
        offset = slope * (j0 - i0).astype(jnp.float32) - slope * i.astype(jnp.float32)
    query, key = over_queries(i0 + i, keys_first), over_keys(j0 + j, keys_first)
    if edge and refs.self_bias is not None:
        t = jnp.where(query == key, t + refs.self_bias[head] * LOG2E, t)
    visible = query >= key if edge else None
    if refs.segments is not None:
        own = read_segments(refs, i0, task.queries, task)
        other = read_segments(refs, j0, task.keys, task)
        same = over_queries(own, keys_first) == over_keys(other, keys_first)
        visible = same if visible is None else visible & same
    return (t if visible is None else jnp.where(visible, t, _HIDDEN)), offset


def read_segments(refs: Operands, start, size: int, task: Task):
    return _read(refs.segments.at[pl.ds(start, size)], _within(start, size, task, ndim=1), 0)


def keys_of(i0, task: Task):
    """Key blocks of the queries i0 …: (first at the diagonal, end)."""
    first = _divided(i0, task.keys)
    end = _divided(i0 + task.queries + task.keys - 1, task.keys)
    return first, jnp.minimum(end, pl.cdiv(task.positions, task.keys))


def queries_of(j0, task: Task):
    """Query blocks of the keys j0 …: (first, first below the diagonal, end)."""
    first = _divided(j0, task.queries)
    below = _divided(j0 + task.keys + task.queries - 2, task.queries)
    end = pl.cdiv(task.positions, task.queries)
    return first, jnp.minimum(below, end), jnp.int32(end)


def _divided(x, size: int):
    """x // size of a number that is not negative."""
    return lax.div(x, jnp.int32(size))


def sweep(visit, start, full: tuple, edge: tuple, edge_first=False):
    """`visit(block, carry, edge)` over two ranges of blocks, those at the diagonal being `edge`."""
    run = lambda bounds, at_edge, carry: lax.fori_loop(
        *bounds, lambda block, carry: visit(block, carry, at_edge), carry
    )
    if edge_first:
        return run(full, False, run(edge, True, start))
    return run(edge, True, run(full, False, start))


def counting(size: int):
    return jnp.arange(size, dtype=jnp.int32)

"""Computations that heads share on a GPU: diagonal tiles, sums over heads, products with both.

The diagonal's scores g_i·h_j are the same for every head, so they are computed once per layer,
and their gradient needs only Σ_k dS^k. Such [B, P, P] arrays hold the squares on or below the
diagonal; the rest is neither written nor read.

Shapes as in `tiles`, with S a square's side, D model dim, C a chunk of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from cem_jax.kernels.gpu import tiles
from cem_jax.kernels.gpu.backward import tile_derivatives
from cem_jax.kernels.gpu.tiles import (
    Operands,
    Output,
    Rows,
    Task,
    Tile,
    counting,
    padded_positions,
    square,
)

_SUMMED = 64  # positions summed over at a time


class Product(NamedTuple):
    """The static options of a product of head-shared arrays."""

    chunk: int  # model dims per step, or per program
    warps: int
    stages: int
    interpret: bool


def common_score(
    a_BJD: Float[Array, "B J D"], b_BJD: Float[Array, "B J D"], scale: float
) -> Float[Array, "B J"]:
    """Return scale·a_i·b̄, b̄ the mean of b before the square of i, or b_0 in the first square.

    This is the common part of a row's scores: the remainder is small enough for a low-precision
    dtype. It does not depend on later positions.
    """
    batch, positions, dim = a_BJD.shape
    side, padded = square(positions), padded_positions(positions)
    squares, missing = padded // side, ((0, 0), (0, padded - positions), (0, 0))
    cut = lambda x: jnp.pad(x.astype(jnp.float32), missing).reshape(batch, squares, side, dim)
    b_BXSD = cut(b_BJD)
    before_BXD = jnp.cumsum(b_BXSD.sum(2), 1)[:, :-1]
    before_BXD /= (side * jnp.arange(1, squares, dtype=jnp.float32))[None, :, None]
    mean_BXD = jnp.concatenate([b_BXSD[:, :1, 0], before_BXD], 1)
    common_BXS = jnp.einsum("bxsd,bxd->bxs", cut(a_BJD), mean_BXD, precision="highest")
    return scale * common_BXS.reshape(batch, padded)[:, :positions]


def pair_scores(
    a_BJD: Float[Array, "B J D"],
    b_BJD: Float[Array, "B J D"],
    scale: float,
    dtype: DTypeLike,
    how: Product,
    offset_BJ: Float[Array, "B J"] | None = None,
) -> Float[Array, "B P P"]:
    """Return scale·a_i·b_j, less `offset_BJ` of row i, clipped to the range of `dtype`."""
    batch, positions, dim = a_BJD.shape
    side, padded = square(positions), padded_positions(positions)
    offsets = ()
    if offset_BJ is not None:
        offsets = (jnp.pad(offset_BJ, ((0, 0), (0, padded - positions))),)
    whole = pl.BlockSpec(
        (None, padded, pl.cdiv(dim, how.chunk) * how.chunk), lambda y, x, b: (b, 0, 0)
    )

    def cem_pair_scores(a_ref, b_ref, *refs):
        *offset_refs, out_ref = refs
        x, y = pl.program_id(1), pl.program_id(0)

        @pl.when(y <= x)
        def _():
            def visit(step, sum_SS):
                read = lambda ref, block: _read(
                    ref, block * side, side, step * how.chunk, how.chunk, positions, dim
                )
                return sum_SS + tiles.dot(read(a_ref, x), read(b_ref, y), transposed=True)

            start = jnp.zeros((side, side), jnp.float32)
            sum_SS = scale * lax.fori_loop(
                jnp.int32(0), jnp.int32(pl.cdiv(dim, how.chunk)), visit, start
            )
            for ref in offset_refs:
                sum_SS -= ref[...][:, None]
            largest = float(jnp.finfo(dtype).max)
            out_ref[...] = jnp.clip(sum_SS, -largest, largest).astype(dtype)

    return _call(
        cem_pair_scores,
        (padded // side, padded // side, batch),
        (whole, whole, *[pl.BlockSpec((None, side), lambda y, x, b: (b, x))] * len(offsets)),
        pl.BlockSpec((None, side, side), lambda y, x, b: (b, x, y)),
        jax.ShapeDtypeStruct((batch, padded, padded), dtype),
        how,
    )(a_BJD, b_BJD, *offsets)


def weighted_sums(
    pairs: Sequence[tuple[Float[Array, "B P P"], Float[Array, "B J D"]]],
    dtype: DTypeLike,
    how: Product,
    *,
    over_queries: bool,
) -> Float[Array, "B J D"]:
    """Return Σ over pairs (w [B, P, P], x [B, J, D]) of Σ_j w_ij x_j, or Σ_i w_ij x_i."""
    batch, positions, dim = pairs[0][1].shape
    side, padded = square(positions), padded_positions(positions)
    blocks, chunks, step = padded // side, pl.cdiv(dim, how.chunk), min(_SUMMED, side)

    def cem_weighted_sums(pair_refs, out_ref):
        own = pl.program_id(1)
        c0 = pl.program_id(0) * how.chunk

        def visit(w_ref, x_ref, other, sum_SC):
            row, column = (other * step, own * side) if over_queries else (own * side, other * step)
            shape = (step, side) if over_queries else (side, step)
            w = w_ref[pl.ds(row, shape[0]), pl.ds(column, shape[1])]
            x = _read(x_ref, other * step, step, c0, how.chunk, positions, dim)
            return sum_SC + tiles.dot(w.T if over_queries else w, x)

        of_own = own * (side // step)
        first, end = (of_own, padded // step) if over_queries else (0, of_own + side // step)
        sum_SC = jnp.zeros((side, how.chunk), jnp.float32)
        for w_ref, x_ref in pair_refs:
            add = lambda other, s, w=w_ref, x=x_ref: visit(w, x, other, s)
            sum_SC = lax.fori_loop(jnp.int32(first), jnp.int32(end), add, sum_SC)
        inside = c0 + counting(how.chunk)[None] < dim
        triton.store(out_ref, sum_SC.astype(out_ref.dtype), mask=inside)

    pair_specs = (
        pl.BlockSpec((None, padded, padded), lambda c, x, b: (b, 0, 0)),
        pl.BlockSpec((None, padded, chunks * how.chunk), lambda c, x, b: (b, 0, 0)),
    )
    return _call(
        cem_weighted_sums,
        (chunks, blocks, batch),
        (tuple(pair_specs for _ in pairs),),
        pl.BlockSpec((None, side, how.chunk), lambda c, x, b: (b, x, c)),
        jax.ShapeDtypeStruct((batch, positions, dim), dtype),
        how,
    )(tuple(pairs))


def _call(kernel, grid, in_specs, out_spec, out_shape, how: Product):
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_spec,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=how.warps, num_stages=how.stages),
        interpret=how.interpret,
        name=kernel.__name__,
    )


def _read(ref, start, size: int, c0, chunk: int, positions: int, dim: int):
    """Read a part of [J, D], with 0 out of bounds."""
    mask = None
    if ref.shape[0] != positions:
        mask = (start + counting(size) < positions)[:, None]
    if ref.shape[1] != dim:
        inside = (c0 + counting(chunk) < dim)[None]
        mask = inside if mask is None else mask & inside
    target = ref.at[pl.ds(start, size), pl.ds(c0, chunk)]
    return target[...] if mask is None else triton.load(target, mask=mask, other=0.0)


def head_sums(
    operands: Operands, task: Task, *, derivative: bool, probability: bool
) -> tuple[Float[Array, "B P P"], ...]:
    """Return (Σ_k c·dS^k, Σ_k P^k), those requested, each [B, P, P] in the dtype of q.

    A program loops over all heads, so the sum needs no extra memory.
    """
    batch = operands.q.shape[0]
    shape = jax.ShapeDtypeStruct((batch, task.padded, task.padded), operands.q.dtype)
    spec = pl.BlockSpec((None, task.queries, task.keys), lambda y, x, b: (b, x, y))
    grid = (task.padded // task.keys, task.padded // task.queries, batch)
    outputs = (Output(shape, spec),) * (derivative + probability)

    def kernel(refs: Operands, out_refs: tuple, task: Task):
        i0, j0 = pl.program_id(1) * task.queries, pl.program_id(0) * task.keys
        crosses = (j0 + task.keys - 1 > i0) & (j0 < i0 + task.queries)
        of_square = lambda x: lax.div(x, jnp.int32(square(task.positions)))
        above = (j0 >= i0 + task.queries) & (of_square(j0) <= of_square(i0))

        def write(sums):
            for ref, sum_IN in zip(out_refs, sums, strict=True):
                ref[...] = sum_IN.astype(ref.dtype)

        def write_sums(edge: bool):
            tile = tiles.tile_at(refs, None, i0, j0, task, edge=edge)
            write(_sum_over_heads(refs, tile, task, derivative, probability))

        pl.when(j0 + task.keys - 1 <= i0)(lambda: write_sums(False))
        pl.when(crosses)(lambda: write_sums(True))
        nothing = jnp.zeros((task.queries, task.keys), jnp.float32)
        pl.when(above)(lambda: write([nothing] * len(out_refs)))

    return tiles.launch(kernel, operands, grid, outputs, task, "cem_head_sums")


def _sum_over_heads(refs: Operands, of_heads: Tile, task: Task, derivative, probability) -> tuple:
    def visit(head, sums):
        tile = of_heads._replace(head=head)
        of_queries = lambda ref: tiles.read_head(ref, tile.i0, task.queries, head, task)
        of_keys = lambda ref: tiles.read_head(ref, tile.j0, task.keys, head, task)
        q, k = of_queries(refs.q), of_keys(refs.k)
        lse_I = tiles.read_lse(refs, tile.i0, head, task)
        if not derivative:
            p_IN = tiles.probabilities(refs, tiles.dot_heads(q, k), lse_I, tile, task)
            return (sums[0] + p_IN,)
        v = k if refs.v is None else of_keys(refs.v)
        delta_I = tiles.read_rows(refs.delta, tile.i0, task.queries, head, task)
        rows = Rows(q, of_queries(refs.do), lse_I, delta_I)
        p_IN, ds_IN = tile_derivatives(refs, rows, k, v, tile, task)
        found = (ds_IN, p_IN) if probability else (ds_IN,)
        return tuple(s + x for s, x in zip(sums, found, strict=True))

    nothing = jnp.zeros((task.queries, task.keys), jnp.float32)
    return lax.fori_loop(
        jnp.int32(0), jnp.int32(task.heads), visit, (nothing,) * (derivative + probability)
    )

"""Gradients of queries, keys and values on a GPU, without atomics.

Each kernel owns what it writes: one per block of queries makes dq, one per block of keys dk. The
second computes its tiles keys first, so both of its products use dSᵀ and Pᵀ as they are.

Shapes as in `tiles`. With c = 1/τ and, if an average of h is requested, E_ij = e_i·h_j:

    dS_ij = p_ij (do_i·v_j + E_ij − Δ_i)        Δ_i = do_i·o_i + Σ_j p_ij E_ij − dlse_i
    dq_i = c Σ_j dS_ij k_j       dk_j = c Σ_i dS_ij q_i       dv_j = Σ_i p_ij do_i, to dk if v is k
    dm = −Σ_j Σ_i (i − j) dS_ij             dβ = Σ_j dS_jj             each sum over i stored per j
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from cem_jax.kernels.call import BIASES, Scores
from cem_jax.kernels.gpu import tiles
from cem_jax.kernels.gpu.tiles import InTile, Operands, Output, Pieces, Rows, Task, Tile


def tile_derivatives(
    refs: Operands, rows: Rows, k: Pieces, v: Pieces, tile: Tile, task: Task
) -> tuple[InTile, InTile]:
    """Return (p, c·dS) of a tile, both float32."""
    pair = (lambda a, b: tiles.dot_heads(b, a)) if tile.keys_first else tiles.dot_heads
    p = tiles.probabilities(refs, pair(rows.q, k), rows.lse_I, tile, task)
    dp = pair(rows.do, v)
    if tile.cross is not None:
        dp += tile.cross
    minus_delta = -tiles.over_queries(rows.delta_I, tile.keys_first)
    return p, p * tiles.multiply_add(dp, task.c, minus_delta, task)


def query_gradient(operands: Operands, task: Task) -> tuple[jax.Array, jax.Array]:
    """Return (dq in the dtype of q, c·Δ [B, K, J]): Δ includes Σ_j p E if there is an E."""
    batch, positions, heads, _ = operands.q.shape
    blocks = pl.cdiv(positions, task.queries)
    number = lambda x: blocks - 1 - x
    dq = jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype)
    outputs = Operands(q=Output(dq, tiles.head_block(task, task.queries, number)))
    if operands.cross is not None:
        delta = jax.ShapeDtypeStruct((batch, heads, positions), jnp.float32)
        outputs = outputs._replace(delta=Output(delta, tiles.row_block(task.queries, number)))
    grid = (heads, blocks, batch)
    found = tiles.launch(_query_kernel, operands, grid, outputs, task, "cem_backward_q")
    return found.q, operands.delta if found.delta is None else found.delta


def _query_kernel(refs: Operands, out_refs: Operands, task: Task):
    head = pl.program_id(0)
    i0 = (pl.num_programs(1) - 1 - pl.program_id(1)) * task.queries
    rows = tiles.read_rows_of(refs, i0, head, task)
    first, end = tiles.keys_of(i0, task)
    ranges = (jnp.int32(0), first), (first, end)
    if out_refs.delta is not None:
        added_I = task.c * _expected_cross(refs, rows, head, i0, ranges, task)
        rows = rows._replace(delta_I=rows.delta_I + added_I)
        out_refs.delta[...] = rows.delta_I

    def visit(block, dq, edge):
        j0 = block * task.keys
        k, v = tiles.read_keys(refs, j0, head, task)
        tile = tiles.tile_at(refs, head, i0, j0, task, edge=edge)
        _, ds_IN = tile_derivatives(refs, rows, k, v, tile, task)
        return tiles.accumulate(dq, ds_IN.astype(k[0].dtype), k)

    start = tiles.zeros(task.queries, task)
    tiles.write_head(out_refs.q, tiles.sweep(visit, start, *ranges), task)


def _expected_cross(refs: Operands, rows: Rows, head, i0, ranges, task: Task):
    """Return Σ_j p_ij E_ij, [I]: a separate pass, since dS needs it before the first tile."""
    without = refs._replace(cross=None)

    def visit(block, sum_I, edge):
        j0 = block * task.keys
        k = tiles.read_head(refs.k, j0, task.keys, head, task)
        tile = tiles.tile_at(without, head, i0, j0, task, edge=edge)
        p_IN = tiles.probabilities(refs, tiles.dot_heads(rows.q, k), rows.lse_I, tile, task)
        return sum_I + (p_IN * tiles.shared_tile(refs.cross, i0, j0, task, False)).sum(1)

    return tiles.sweep(visit, jnp.zeros((task.queries,), jnp.float32), *ranges)


def key_gradients(operands: Operands, task: Task) -> tuple[jax.Array, jax.Array | None, Scores]:
    """Return (dk, dv or None, gradients of the biases)."""
    batch, positions, heads, _ = operands.q.shape
    blocks = pl.cdiv(positions, task.keys)
    number = lambda x: x  # the first keys have the most queries
    wide = Output(
        jax.ShapeDtypeStruct(operands.k.shape, operands.k.dtype),
        tiles.head_block(task, task.keys, number),
    )
    narrow = Output(
        jax.ShapeDtypeStruct((batch, heads, positions), jnp.float32),
        tiles.row_block(task.keys, number),
    )
    biases = {name: narrow for name in BIASES if getattr(operands.scores, name) is not None}
    v = None if operands.v is None else wide
    outputs = Operands(k=wide, v=v, scores=Scores(**biases))
    grid = (heads, blocks, batch)
    found = tiles.launch(_key_kernel, operands, grid, outputs, task, "cem_backward_k")
    return found.k, found.v, tiles.bias_gradients(found.scores, task)


def _key_kernel(refs: Operands, out_refs: Operands, task: Task):
    head = pl.program_id(0)
    j0 = pl.program_id(1) * task.keys
    k, v = tiles.read_keys(refs, j0, head, task)
    nothing_N = jnp.zeros((task.keys,), jnp.float32)

    def visit(block, carry, edge):
        dk, dv, sums = carry
        i0 = block * task.queries
        rows = tiles.read_rows_of(refs, i0, head, task)
        tile = tiles.tile_at(refs, head, i0, j0, task, edge=edge, keys_first=True)
        p_NI, ds_NI = tile_derivatives(refs, rows, k, v, tile, task)
        dk = tiles.accumulate(dk, ds_NI.astype(rows.q[0].dtype), rows.q)
        if refs.v is None:
            dk = tiles.accumulate(dk, p_NI.astype(rows.q[0].dtype), rows.do)
        else:
            dv = tiles.accumulate(dv, p_NI.astype(rows.q[0].dtype), rows.do)
        return dk, dv, tiles.add_bias_gradients(refs, sums, tile, ds_NI, task)

    start = (
        tiles.zeros(task.keys, task),
        () if refs.v is None else tiles.zeros(task.keys, task),
        Scores(**dict.fromkeys(BIASES, nothing_N)),
    )
    first, below, end = tiles.queries_of(j0, task)
    dk, dv, sums = tiles.sweep(visit, start, (below, end), (first, below), edge_first=True)
    tiles.write_head(out_refs.k, dk, task)
    if refs.v is not None:
        tiles.write_head(out_refs.v, dv, task)
    for ref, sum_N in zip(out_refs.scores, sums, strict=True):
        if ref is not None:
            ref[...] = sum_N

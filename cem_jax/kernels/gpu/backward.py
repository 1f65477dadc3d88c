"""Gradients of queries, keys and values on a GPU, without atomics.

Each kernel owns what it writes: one per block of queries makes dq, one per block of keys dk. The
second computes its tiles keys first, so that both of its products take dSᵀ and Pᵀ as they are.

Shapes as in `gpu_tiles`. With c = 1/τ and, in exact mode, E_ij = e_i·h_j:

    dS_ij = p_ij (do_i·v_j + E_ij − Δ_i)        Δ_i = do_i·o_i + Σ_j p_ij E_ij − dlse_i
    dq_i = c Σ_j dS_ij k_j       dk_j = c Σ_i dS_ij q_i       dv_j = Σ_i p_ij do_i, to dk if v is k
    dm = −Σ_j Σ_i (i − j) dS_ij             dβ = Σ_j dS_jj             each sum over i written per j
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from cem_jax.kernels.gpu.tiles import (
    SMALLEST,
    Operands,
    Task,
    accumulate,
    counting,
    dot,
    dot_heads,
    exp2,
    head_block,
    keys_of,
    launch,
    multiply_add,
    over_queries,
    queries_of,
    read_head,
    read_lse,
    read_rows,
    row_block,
    scores,
    shared_tile,
    sweep,
    write_head,
    zeros,
)  # fmt: skip


def tile_derivatives(refs: Operands, q, k, v, do, lse_I, delta_I, head, i0, j0, task, *, edge,
                     keys_first=False, tile=None, extra=None):  # fmt: skip
    """(p, c·dS) of a tile, both float32. [I, N], or [N, I] with `keys_first`.

    `lse_I` and `delta_I` as in `Operands`. `tile`, `extra`: head-shared tiles, where there are.
    """
    pair = (lambda a, b: dot_heads(b, a)) if keys_first else dot_heads
    t, offset_I = scores(
        refs, pair(q, k), tile, head, i0, j0, task, edge=edge, keys_first=keys_first
    )
    p = exp2(t - over_queries(lse_I - offset_I, keys_first), task)
    dp = pair(do, v)
    if extra is not None:
        dp += extra
    return p, p * multiply_add(dp, task.scale, -over_queries(delta_I, keys_first), task)


def query_gradient(operands: Operands, task: Task):
    """(dq in the dtype of q, c·Δ [B, K, J]): Δ with Σ_j p E added where there is an E."""
    batch, positions, heads, _ = operands.q.shape
    blocks = pl.cdiv(positions, task.queries)
    number = lambda x: blocks - 1 - x
    outputs = [
        (
            jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype),
            head_block(task, task.queries, number),
        )
    ]
    exact = operands.extra is not None
    if exact:
        delta = jax.ShapeDtypeStruct((batch, heads, positions), jnp.float32)
        outputs.append((delta, row_block(task.queries, number)))
    grid = (heads, blocks, batch)
    found = launch(_query_kernel, operands, grid, outputs, task, "cem_backward_q")
    return found if exact else (found[0], operands.delta)


def _query_kernel(refs: Operands, dq_ref, *delta_ref, task: Task):
    head = pl.program_id(0)
    i0 = (pl.num_programs(1) - 1 - pl.program_id(1)) * task.queries
    q = read_head(refs.q, i0, task.queries, head, task)
    do = read_head(refs.do, i0, task.queries, head, task)
    lse_I = read_lse(refs, i0, head, task)
    delta_I = read_rows(refs.delta, i0, task.queries, head, task)
    first, end = keys_of(i0, task)
    ranges = (jnp.int32(0), first), (first, end)
    if delta_ref:
        delta_I += task.scale * _expected_extra(refs, q, lse_I, head, i0, ranges, task)
        delta_ref[0][...] = delta_I

    def visit(block, dq, edge):
        j0 = block * task.keys
        k = read_head(refs.k, j0, task.keys, head, task)
        v = k if refs.v is None else read_head(refs.v, j0, task.keys, head, task)
        _, ds_IN = tile_derivatives(
            refs, q, k, v, do, lse_I, delta_I, head, i0, j0, task, edge=edge,
            **_shared(refs, i0, j0, task, False),
        )  # fmt: skip
        return accumulate(dq, ds_IN.astype(k[0].dtype), k)

    write_head(dq_ref, sweep(visit, zeros(task.queries, task), *ranges), task)


def _expected_extra(refs: Operands, q, lse_I, head, i0, ranges, task: Task):
    """Σ_j p_ij E_ij: a pass of its own, since dS needs it before the first tile. [I]."""

    def visit(block, sum_I, edge):
        j0 = block * task.keys
        k = read_head(refs.k, j0, task.keys, head, task)
        tile_IN = shared_tile(refs.tile, i0, j0, task, False)
        t_IN, offset_I = scores(refs, dot_heads(q, k), tile_IN, head, i0, j0, task, edge=edge)
        p_IN = exp2(t_IN - (lse_I - offset_I)[:, None], task)
        return sum_I + (p_IN * shared_tile(refs.extra, i0, j0, task, False)).sum(1)

    return sweep(visit, jnp.zeros((task.queries,), jnp.float32), *ranges)


def _shared(refs: Operands, i0, j0, task: Task, keys_first: bool) -> dict:
    """The head-shared tiles of queries i0 … and keys j0 …, those there are."""
    found = dict(tile=refs.tile, extra=refs.extra)
    return {
        name: None if ref is None else shared_tile(ref, i0, j0, task, keys_first)
        for name, ref in found.items()
    }


def key_gradients(operands: Operands, task: Task):
    """(dk, dv or None, dslopes [K] or None, dself_bias [K] or None)."""
    batch, positions, heads, _ = operands.q.shape
    blocks = pl.cdiv(positions, task.keys)
    number = lambda x: x  # the first keys have the most queries
    wide = (
        jax.ShapeDtypeStruct(operands.k.shape, operands.k.dtype),
        head_block(task, task.keys, number),
    )
    narrow = (
        jax.ShapeDtypeStruct((batch, heads, positions), jnp.float32),
        row_block(task.keys, number),
    )
    given = lambda x: int(x is not None)
    outputs = (
        *[wide] * (1 + given(operands.v)),
        *[narrow] * (given(operands.slopes) + given(operands.self_bias)),
    )
    grid = (heads, blocks, batch)
    dk, *rest = launch(_key_kernel, operands, grid, outputs, task, "cem_backward_k")
    dv = None if operands.v is None else rest.pop(0)
    sums = [x.sum((0, 2)) / task.scale for x in rest]
    dslopes = None if operands.slopes is None else -sums.pop(0)
    return dk, dv, dslopes, None if operands.self_bias is None else sums.pop(0)


def _distances(ds_NI, ahead):
    """Σ_i (i − j) dS of a tile whose queries start `ahead` of its keys. [N].

    Both sums that it takes, of dS and of dS times the place in the block, are one matrix
    instruction: places are exact in low precision, and the vector units are the busier ones.
    """
    keys, queries = ds_NI.shape
    i_I1, column_1M = counting(queries)[:, None], counting(SMALLEST)[None]
    weights_IM = jnp.where(column_1M == 0, i_I1, jnp.where(column_1M == 1, 1, 0))
    sums_NM = dot(ds_NI, weights_IM.astype(ds_NI.dtype))
    shift_N1 = (ahead - counting(keys)).astype(jnp.float32)[:, None]
    shift_NM = jnp.where(column_1M == 0, 1.0, jnp.where(column_1M == 1, shift_N1, 0.0))
    return (sums_NM * shift_NM).sum(1)


def _key_kernel(refs: Operands, dk_ref, *out_refs, task: Task):
    head = pl.program_id(0)
    j0 = pl.program_id(1) * task.keys
    k = read_head(refs.k, j0, task.keys, head, task)
    v = k if refs.v is None else read_head(refs.v, j0, task.keys, head, task)
    nothing_N = jnp.zeros((task.keys,), jnp.float32)

    def visit(block, carry, edge):
        dk, dv, far_N, own_N = carry
        i0 = block * task.queries
        q = read_head(refs.q, i0, task.queries, head, task)
        do = read_head(refs.do, i0, task.queries, head, task)
        lse_I = read_lse(refs, i0, head, task)
        delta_I = read_rows(refs.delta, i0, task.queries, head, task)
        p_NI, ds_NI = tile_derivatives(
            refs, q, k, v, do, lse_I, delta_I, head, i0, j0, task, edge=edge, keys_first=True,
            **_shared(refs, i0, j0, task, True),
        )  # fmt: skip
        dk = accumulate(dk, ds_NI.astype(q[0].dtype), q)
        if refs.v is None:
            dk = accumulate(dk, p_NI.astype(q[0].dtype), do)
        else:
            dv = accumulate(dv, p_NI.astype(q[0].dtype), do)
        if refs.slopes is not None:
            far_N += _distances(ds_NI.astype(q[0].dtype), i0 - j0)
        if refs.self_bias is not None and edge:
            i, j = i0 + counting(task.queries), j0 + counting(task.keys)
            own_N += jnp.where(i[None] == j[:, None], ds_NI, 0.0).sum(1)
        return dk, dv, far_N, own_N

    start = (zeros(task.keys, task), () if refs.v is None else zeros(task.keys, task))
    first, below, end = queries_of(j0, task)
    dk, dv, far_N, own_N = sweep(
        visit, (*start, nothing_N, nothing_N), (below, end), (first, below), edge_first=True
    )
    write_head(dk_ref, dk, task)
    out_refs = list(out_refs)
    if refs.v is not None:
        write_head(out_refs.pop(0), dv, task)
    if refs.slopes is not None:
        out_refs.pop(0)[...] = far_N
    if refs.self_bias is not None:
        out_refs.pop(0)[...] = own_N

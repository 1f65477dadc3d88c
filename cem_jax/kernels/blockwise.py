"""Attention, its keys as values or with values of their own, tile by tile: O(J) memory anywhere.

One scan visits the tiles on or below the diagonal, row after row; a tile is [B, K, I, N] scores.
The backward pass is written out, so nothing of a tile outlives its visit.

Shapes: B batch · J positions · K heads · R head dim · D model dim · G 1 if the heads share the
diagonal, else K · C 1 for a context summed over heads, else K · I, N positions of a query and a key
block · X, Y number of query and key blocks.

Per row i and head k, with c = 1/τ, p = softmax of s, e the gradient of a and E_ij = e_i·h_j:

    lse_i = log Σ_j exp s_ij        o_i = Σ_j p_ij v_j        a_i = Σ_j p_ij h_j
    dS_ij = p_ij (do_i·v_j + E_ij − Δ_i)     Δ_i = do_i·o_i + Σ_j p_ij E_ij − dlse_i
    dq_i = c Σ_j dS_ij k_j          dk_j = c Σ_i dS_ij q_i    dv_j = Σ_i p_ij do_i, to dk if v is k
    dg_i = c Σ_j dS_ij h_j          dh_j = Σ_i (c dS_ij g_i + p_ij e_i)
    dm = −Σ_ij (i − j) dS_ij        dβ = Σ_i dS_ii
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cem_jax.kernels.call import Inputs, Plan, accumulator
from cem_jax.kernels.chunks import Chunks


class Window(NamedTuple):
    """Queries that are some blocks of the sequence, in any order, against all of its keys."""

    starts: jax.Array  # first position of each query block, [X]
    tiles: jax.Array  # (query block, key block) of the tiles to visit, [·, 2]


def whole(positions: int, blocks: tuple[int, int]) -> Window:
    """All queries: every tile that holds a pair j ≤ i, rows in order."""
    queries, keys = blocks
    starts = np.arange(0, positions, queries, dtype=np.int32)
    return Window(starts, _tiles(starts, -(-positions // keys), blocks))


def _tiles(starts, key_blocks: int, blocks: tuple[int, int]) -> np.ndarray:
    queries, keys = blocks
    tiles = [
        (x, y)
        for x, start in enumerate(starts)
        for y in range(key_blocks)
        if y * keys < start + queries
    ]
    return np.array(tiles, np.int32)


class Blocked(NamedTuple):
    """Inputs cut into blocks, the block axis first."""

    q: jax.Array  # [X, B, K, I, R]
    k: jax.Array  # [Y, B, K, N, R]
    v: jax.Array | None  # [Y, B, K, N, R]; None: the keys
    g: jax.Array | None  # [X, B, G, I, D]
    h: jax.Array | None  # [Y, B, 1, N, D]
    slopes: jax.Array | None  # [K]
    self_bias: jax.Array | None  # [K]
    query_segments: jax.Array | None  # [X, B, 1, I]
    key_segments: jax.Array | None  # [Y, B, 1, N]
    window: Window | None


def default_blocks(positions: int) -> tuple[int, int]:
    """Tiles that stay in a core's cache: 64 beat 128 on CPU up to some hundred positions."""
    size = 64 if positions <= 512 else 128
    return min(size, positions), min(size, positions)


def _placed(inputs: Inputs, plan: Plan, chunks: Chunks | None) -> tuple[Plan, Window | None]:
    """The plan with its blocks, and their tiles; None for those of a whole sequence."""
    positions = inputs.k.shape[1]
    blocks = plan.blocks or default_blocks(positions)
    if chunks is None:
        return plan._replace(blocks=blocks), None
    limit = min(*blocks, chunks.length)
    block = max(size for size in range(1, limit + 1) if chunks.length % size == 0)
    blocks, starts = (block, block), chunks.blocks(block)
    tiles = [_tiles(x, positions // block, blocks) for x in starts]
    return plan._replace(blocks=blocks), Window(chunks.own(starts), chunks.own(tiles))


def forward(inputs: Inputs, plan: Plan, chunks: Chunks | None = None):
    """lse [B, K, J], o [B, J, K, R] and a: None, [B, J, D] or [B, J, K, D] by `plan.context`.

    In the accumulator's dtype (float32 or float64). With `chunks`, q and g are their queries.
    """
    return _forward(inputs, *_placed(inputs, plan, chunks))


def backward(
    inputs: Inputs, plan: Plan, lse_BKJ, o_BJKR, a, cotangents, chunks: Chunks | None = None
) -> Inputs:
    """The gradients of `inputs` from those of (lse, o, a), whose values are given too."""
    plan, window = _placed(inputs, plan, chunks)
    return _backward(inputs, plan, window, lse_BKJ, o_BJKR, a, cotangents)


# Jitted, or each call outside a jit would compile its scans anew.
@partial(jax.jit, static_argnums=1)
def _forward(inputs: Inputs, plan: Plan, window: Window | None):
    blocked = _cut(inputs, plan, window)
    lse_XBKI, o_XBKIR = _sweep_forward(blocked, plan)
    positions = inputs.q.shape[1]
    lse_BKJ = _join_heads_first(lse_XBKI, positions)
    o_BJKR = _join(o_XBKIR, positions)
    a = None
    if plan.context != "none":
        a_XBCID = _sweep_context(blocked, lse_XBKI, plan)
        a = _join(a_XBCID, positions)
        a = a[:, :, 0] if plan.context == "summed" else a
    return lse_BKJ, o_BJKR, a


@partial(jax.jit, static_argnums=1)
def _backward(inputs: Inputs, plan: Plan, window: Window | None, lse_BKJ, o_BJKR, a, cotangents):
    dlse_BKJ, do_BJKR, da = cotangents
    block = plan.blocks[0]
    blocked = _cut(inputs, plan, window)
    # exp(s − ∞) = 0: the rows that padding added take no part
    lse_XBKI = _cut_heads_first(lse_BKJ, block, padding=jnp.inf)
    # rounded first: do·k − do·o of a row that sees one key is then 0 in low precision too
    do_BJKR = do_BJKR.astype(inputs.q.dtype)
    do_o_BKJ = jnp.einsum("bjkr,bjkr->bkj", do_BJKR.astype(o_BJKR.dtype), o_BJKR)
    delta_BKJ = do_o_BKJ - dlse_BKJ
    delta_XBKI = _cut_heads_first(delta_BKJ, block)
    e_XBCID = None
    if plan.context != "none":
        per_head = da if plan.context == "per_head" else da[:, :, None]
        e_XBCID = _cut_positions(per_head.astype(inputs.q.dtype), block)
        delta_XBKI += _sweep_delta(blocked, lse_XBKI, e_XBCID, plan)
    do_XBKIR = _cut_positions(do_BJKR, block)
    grads = _sweep_backward(blocked, lse_XBKI, delta_XBKI, do_XBKIR, e_XBCID, plan)
    return _uncut_gradients(grads, inputs)


# One tile: scores and probabilities.


def _scores(blocked: Blocked, x, y, plan: Plan):
    """s of query block x against key block y, −∞ replaced by a finite floor. [B, K, I, N]."""
    q_BKIR, k_BKNR = blocked.q[x], blocked.k[y]
    dtype = accumulator(q_BKIR.dtype)
    s_BKIN = _product("bkir,bknr->bkin", q_BKIR, k_BKNR)
    if blocked.g is not None:
        s_BKIN += _product("bgid,bnd->bgin", blocked.g[x], blocked.h[y][:, 0])
    s_BKIN *= 1.0 / plan.tau
    distance_IN = _distance(blocked, x, y, plan)
    bias_KIN = jnp.zeros((1, 1, 1), dtype)
    if blocked.slopes is not None:
        bias_KIN = bias_KIN - blocked.slopes.astype(dtype)[:, None, None] * distance_IN[None]
    if blocked.self_bias is not None:
        beta_K11 = blocked.self_bias.astype(dtype)[:, None, None]
        bias_KIN = bias_KIN + jnp.where(distance_IN[None] == 0, beta_K11, 0.0)
    visible = (distance_IN >= 0)[None, None]
    if blocked.query_segments is not None:
        query, key = blocked.query_segments[x], blocked.key_segments[y]
        visible = visible & (query[..., :, None] == key[..., None, :])
    return jnp.where(visible, s_BKIN + bias_KIN[None], jnp.finfo(dtype).min / 2)


def _probabilities(blocked: Blocked, lse_XBKI, x, y, plan: Plan):
    return jnp.exp(_scores(blocked, x, y, plan) - lse_XBKI[x][..., None])


def _distance(blocked: Blocked, x, y, plan: Plan):
    """i − j over a tile. [I, N]."""
    queries, keys = plan.blocks
    i = jnp.asarray(blocked.window.starts)[x] + jnp.arange(queries)
    j = y * keys + jnp.arange(keys)
    return i[:, None] - j[None, :]


def _product(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=accumulator(a.dtype))


# The sweeps.


def _sweep(visit, carry, blocked: Blocked):
    """Carry through the tiles."""
    step = lambda carry, tile: (visit(carry, tile[0], tile[1]), None)
    return lax.scan(step, carry, blocked.window.tiles)[0]


def _sweep_forward(blocked: Blocked, plan: Plan):
    dtype = accumulator(blocked.q.dtype)
    rows = blocked.q.shape[:-1]

    def visit(carry, x, y):
        peak, total, o = carry
        s_BKIN = _scores(blocked, x, y, plan)
        old_peak = peak[x]
        new_peak = jnp.maximum(old_peak, s_BKIN.max(-1))
        weight_BKIN = jnp.exp(s_BKIN - new_peak[..., None])
        keep = jnp.exp(old_peak - new_peak)
        v_BKNR = blocked.k[y] if blocked.v is None else blocked.v[y]
        fresh_o = _product("bkin,bknr->bkir", weight_BKIN.astype(v_BKNR.dtype), v_BKNR)
        return (
            peak.at[x].set(new_peak),
            total.at[x].set(total[x] * keep + weight_BKIN.sum(-1)),
            o.at[x].set(o[x] * keep[..., None] + fresh_o),
        )

    start = (
        jnp.full(rows, jnp.finfo(dtype).min / 2, dtype),
        jnp.zeros(rows, dtype),
        jnp.zeros(blocked.q.shape, dtype),
    )
    peak, total, o = _sweep(visit, start, blocked)
    return peak + jnp.log(total), o / total[..., None]


def _sweep_context(blocked: Blocked, lse_XBKI, plan: Plan):
    """a_i = Σ_j p_ij h_j. A second sweep: a sum over heads needs every head's softmax finished."""
    *_, model_dim = blocked.h.shape
    rows = blocked.q.shape[:-1]
    heads = 1 if plan.context == "summed" else rows[2]

    def visit(a, x, y):
        p_BKIN = _probabilities(blocked, lse_XBKI, x, y, plan)
        p_BCIN = _share(p_BKIN, heads).astype(blocked.h.dtype)
        return a.at[x].add(_product("bcin,bnd->bcid", p_BCIN, blocked.h[y][:, 0]))

    start = jnp.zeros((rows[0], rows[1], heads, rows[3], model_dim), lse_XBKI.dtype)
    return _sweep(visit, start, blocked)


def _sweep_delta(blocked: Blocked, lse_XBKI, e_XBCID, plan: Plan):
    """Σ_j p_ij E_ij, for each head. [X, B, K, I]."""

    def visit(delta, x, y):
        p_BKIN = _probabilities(blocked, lse_XBKI, x, y, plan)
        e_BCIN = _product("bcid,bnd->bcin", e_XBCID[x], blocked.h[y][:, 0])
        return delta.at[x].add((p_BKIN * e_BCIN).sum(-1))

    return _sweep(visit, jnp.zeros_like(lse_XBKI), blocked)


def _sweep_backward(blocked: Blocked, lse_XBKI, delta_XBKI, do_XBKIR, e_XBCID, plan: Plan):
    dtype = lse_XBKI.dtype
    c = 1.0 / plan.tau

    def visit(grads: Blocked, x, y):
        q, k, do = blocked.q[x], blocked.k[y], do_XBKIR[x]
        v = k if blocked.v is None else blocked.v[y]
        p = _probabilities(blocked, lse_XBKI, x, y, plan)
        dp = _product("bkir,bknr->bkin", do, v)
        if e_XBCID is not None:
            dp += _product("bcid,bnd->bcin", e_XBCID[x], blocked.h[y][:, 0])
        ds = p * (dp - delta_XBKI[x][..., None])
        grads = _add_bias_gradients(grads, ds, _distance(blocked, x, y, plan))
        scaled = c * ds
        ds, p_low = scaled.astype(q.dtype), p.astype(q.dtype)
        dk = _product("bkin,bkir->bknr", ds, q)
        dv = _product("bkin,bkir->bknr", p_low, do)
        if blocked.v is None:
            dk += dv
        else:
            grads = grads._replace(v=grads.v.at[y].add(dv))
        grads = grads._replace(
            q=grads.q.at[x].add(_product("bkin,bknr->bkir", ds, k)), k=grads.k.at[y].add(dk)
        )
        if blocked.g is None:
            return grads
        g, h = blocked.g[x], blocked.h[y][:, 0]
        ds_BGIN = _share(scaled, g.shape[1]).astype(q.dtype)
        dh = _product("bgin,bgid->bnd", ds_BGIN, g)
        if e_XBCID is not None:
            p_BCIN = _share(p, e_XBCID.shape[2]).astype(q.dtype)
            dh += _product("bcin,bcid->bnd", p_BCIN, e_XBCID[x])
        return grads._replace(
            g=grads.g.at[x].add(_product("bgin,bnd->bgid", ds_BGIN, h)),
            h=grads.h.at[y].add(dh[:, None]),
        )

    fixed = dict(query_segments=None, key_segments=None, window=None)
    start = jax.tree.map(lambda t: jnp.zeros(t.shape, dtype), blocked._replace(**fixed))
    return _sweep(visit, start, blocked)


def _add_bias_gradients(grads: Blocked, ds_BKIN, distance_IN) -> Blocked:
    if grads.slopes is None and grads.self_bias is None:
        return grads
    ds_KIN = ds_BKIN.sum(0)
    if grads.slopes is not None:
        grads = grads._replace(slopes=grads.slopes - (ds_KIN * distance_IN[None]).sum((1, 2)))
    if grads.self_bias is not None:
        on_diagonal = jnp.where(distance_IN[None] == 0, ds_KIN, 0.0)
        grads = grads._replace(self_bias=grads.self_bias + on_diagonal.sum((1, 2)))
    return grads


def _share(t_BKIN, heads: int):
    """Summed over the heads where they share one tile."""
    return t_BKIN.sum(1, keepdims=True) if heads == 1 else t_BKIN


# Cutting into blocks and joining again. Padding stands behind every real position, so no real query
# sees a padded key.


def _cut(inputs: Inputs, plan: Plan, window: Window | None) -> Blocked:
    queries, keys = plan.blocks
    g, h, segments = inputs.g, inputs.h, inputs.segments
    if window is None:
        window = whole(inputs.q.shape[1], plan.blocks)
    if g is not None:
        g = _cut_positions(g if g.ndim == 4 else g[:, :, None], queries)
        h = _cut_positions(h[:, :, None], keys)
    query_segments = key_segments = None
    if segments is not None:
        positions_XI = window.starts[:, None] + np.arange(queries)[None]
        taken_BXI = jnp.take(segments, positions_XI, axis=1, mode="fill", fill_value=-1)
        query_segments = taken_BXI.transpose(1, 0, 2)[:, :, None]
        key_segments = _cut_heads_first(segments[:, None], keys, padding=-1)
    return Blocked(
        _cut_positions(inputs.q, queries),
        _cut_positions(inputs.k, keys),
        None if inputs.v is None else _cut_positions(inputs.v, keys),
        g,
        h,
        inputs.slopes,
        inputs.self_bias,
        query_segments,
        key_segments,
        window,
    )


def _cut_positions(x_BJKR, size: int):
    """[B, J, K, R] → [X, B, K, I, R], padded with zeros."""
    batch, positions, heads, width = x_BJKR.shape
    count = -(-positions // size)
    x = jnp.pad(x_BJKR, ((0, 0), (0, count * size - positions), (0, 0), (0, 0)))
    return x.reshape(batch, count, size, heads, width).transpose(1, 0, 3, 2, 4)


def _join(x_XBKIR, positions: int):
    """[X, B, K, I, R] → [B, J, K, R]."""
    count, batch, heads, size, width = x_XBKIR.shape
    x = x_XBKIR.transpose(1, 0, 3, 2, 4).reshape(batch, count * size, heads, width)
    return x[:, :positions]


def _cut_heads_first(x_BKJ, size: int, padding=0):
    """[B, K, J] → [X, B, K, I]."""
    batch, heads, positions = x_BKJ.shape
    count = -(-positions // size)
    x = jnp.pad(x_BKJ, ((0, 0), (0, 0), (0, count * size - positions)), constant_values=padding)
    return x.reshape(batch, heads, count, size).transpose(2, 0, 1, 3)


def _join_heads_first(x_XBKI, positions: int):
    """[X, B, K, I] → [B, K, J]."""
    count, batch, heads, size = x_XBKI.shape
    return x_XBKI.transpose(1, 2, 0, 3).reshape(batch, heads, count * size)[..., :positions]


def _uncut_gradients(grads: Blocked, inputs: Inputs) -> Inputs:
    queries, keys = inputs.q.shape[1], inputs.k.shape[1]
    joined = Inputs(
        _join(grads.q, queries),
        _join(grads.k, keys),
        None if grads.v is None else _join(grads.v, keys),
        None if grads.g is None else _join(grads.g, queries).reshape(inputs.g.shape),
        None if grads.h is None else _join(grads.h, keys).reshape(inputs.h.shape),
        grads.slopes,
        grads.self_bias,
        None,
    )
    return Inputs(
        *(None if x is None else x.astype(y.dtype) for x, y in zip(joined, inputs, strict=True))
    )

"""Attention with keys as values or with separate values, tile by tile: O(J) memory, any platform.

One scan visits the tiles on or below the diagonal, row after row; a tile is [B, K, I, N] scores.
The backward pass is written by hand, so no part of a tile is kept after its visit.

Shapes: B batch · J positions · K heads · R head dim · D model dim · G 1 if the heads share the
diagonal, else K · C 1 for an average summed over heads, else K · I, N positions of a query and a
key block · X, Y number of query and key blocks.

Per row i and head k, with c = 1/τ, p = softmax of s, e the gradient of a and E_ij = e_i·h_j:

    lse_i = log Σ_j exp s_ij        o_i = Σ_j p_ij v_j        a_i = Σ_j p_ij h_j
    dS_ij = p_ij (do_i·v_j + E_ij − Δ_i)     Δ_i = do_i·o_i + Σ_j p_ij E_ij − dlse_i
    dq_i = c Σ_j dS_ij k_j          dk_j = c Σ_i dS_ij q_i    dv_j = Σ_i p_ij do_i, to dk if v is k
    dg_i = c Σ_j dS_ij h_j          dh_j = Σ_i (c dS_ij g_i + p_ij e_i)
    biases of the scores: Σ_ij dS_ij times their own gradient, `Scores.bias`
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from cem_jax.kernels.call import (
    Call,
    Chunks,
    Implementation,
    Options,
    Outputs,
    accumulator,
    in_front,
    visible,
)

Index = int | Int[Array, ""]
T = TypeVar("T")


class Window(NamedTuple):
    """Query blocks of the sequence, in any order, and the tiles they form with all of its keys."""

    starts: jax.Array  # first position of each query block, [X]
    tiles: jax.Array  # (query block, key block) of the tiles to visit, [·, 2]


class Blocked(NamedTuple):
    """A call cut into blocks, with the block axis first."""

    call: Call  # q [X, B, K, I, R]; k, v [Y, B, K, N, R]; g [X, B, G, I, D]; h [Y, B, 1, N, D]
    query_segments: jax.Array | None  # [X, B, I]
    key_segments: jax.Array | None  # [Y, B, N]
    window: Window

    def distance(self, x: Index, y: Index) -> Int[Array, "I N"]:
        """Return i − j over a tile."""
        (*_, queries, _), (*_, keys, _) = self.call.q.shape, self.call.k.shape
        i = jnp.asarray(self.window.starts)[x] + jnp.arange(queries)
        j = y * keys + jnp.arange(keys)
        return i[:, None] - j[None, :]

    def sweep(self, visit: Callable[[T, Index, Index], T], carry: T) -> T:
        """Scan over the tiles: carry = visit(carry, query block, key block)."""
        step = lambda carry, tile: (visit(carry, tile[0], tile[1]), None)
        return lax.scan(step, carry, self.window.tiles)[0]


def default_blocks(positions: int) -> tuple[int, int]:
    """Return block sizes whose tiles stay in a core's cache.

    On CPU, blocks of 64 beat 128 for sequences of up to a few hundred positions.
    """
    size = 64 if positions <= 512 else 128
    return min(size, positions), min(size, positions)


def forward(call: Call, options: Options, chunks: Chunks | None = None) -> Outputs:
    """Return the outputs; with `chunks`, q and g hold only the queries of those chunks."""
    return _forward(call, *_placed(call, options, chunks))


def backward(
    call: Call, options: Options, outputs: Outputs, bar: Outputs, chunks: Chunks | None = None
) -> Call:
    """Return the gradients of `call`, from `bar`, those of `outputs`."""
    return _backward(call, *_placed(call, options, chunks), outputs, bar)


IMPLEMENTATION = Implementation(forward, backward, lambda call, options: None)


def _placed(call: Call, options: Options, chunks: Chunks | None) -> tuple[Options, Window]:
    """Return the options with block sizes filled in, and the resulting window of tiles."""
    positions = call.k.shape[1]
    queries, keys = options.block_sizes or default_blocks(positions)
    key_blocks = lambda size: -(-positions // size)
    if chunks is None:
        starts = np.arange(0, positions, queries, dtype=np.int32)
        window = Window(starts, tiles_of(starts, key_blocks(keys), (queries, keys)))
    else:
        limit = min(queries, keys, chunks.length)
        queries = keys = max(n for n in range(1, limit + 1) if chunks.length % n == 0)
        starts = chunks.blocks(queries)
        tiles = [tiles_of(x, key_blocks(keys), (queries, keys)) for x in starts]
        window = Window(chunks.own(starts), chunks.own(tiles))
    return replace(options, block_sizes=(queries, keys)), window


def tiles_of(starts: np.ndarray, key_blocks: int, blocks: tuple[int, int]) -> np.ndarray:
    """List the tiles with a pair j ≤ i, rows in order: (query block, key block), [·, 2]."""
    queries, keys = blocks
    tiles = [
        (x, y)
        for x, start in enumerate(starts)
        for y in range(key_blocks)
        if y * keys < start + queries
    ]
    return np.array(tiles, np.int32)


# Jitted so that calls outside a jit do not recompile the scans.
@partial(jax.jit, static_argnums=1)
def _forward(call: Call, options: Options, window: Window) -> Outputs:
    blocked = _cut(call, options, window)
    positions = call.q.shape[1]
    lse_XBKI, o_XBKIR = _sweep_forward(blocked, options)
    a = None
    if options.average != "none":
        a = _join(_sweep_average(blocked, lse_XBKI, options), positions)
        a = a[:, :, 0] if options.average == "summed" else a
    return Outputs(_join_heads_first(lse_XBKI, positions), _join(o_XBKIR, positions), a)


@partial(jax.jit, static_argnums=1)
def _backward(call: Call, options: Options, window: Window, outputs: Outputs, bar: Outputs) -> Call:
    block, _ = options.block_sizes
    blocked = _cut(call, options, window)
    # exp(s − ∞) = 0: padded rows contribute nothing
    lse_XBKI = _cut_heads_first(outputs.lse, block, padding=jnp.inf)
    # rounded first: do·k − do·o of a row that sees one key is then 0 in low precision too
    do_BJKR = bar.o.astype(call.q.dtype)
    do_o_BKJ = jnp.einsum("bjkr,bjkr->bkj", do_BJKR.astype(outputs.o.dtype), outputs.o)
    delta_XBKI = _cut_heads_first(do_o_BKJ - bar.lse, block)
    e_XBCID = None
    if options.average != "none":
        per_head = bar.a if options.average == "per_head" else bar.a[:, :, None]
        e_XBCID = _cut_positions(per_head.astype(call.q.dtype), block)
        delta_XBKI += _sweep_delta(blocked, lse_XBKI, e_XBCID, options)
    do_XBKIR = _cut_positions(do_BJKR, block)
    grads = _sweep_backward(blocked, lse_XBKI, delta_XBKI, do_XBKIR, e_XBCID, options)
    return _uncut_gradients(grads, call)


# One tile: scores and probabilities.


def _scores(blocked: Blocked, x, y, options: Options):
    """Return s [B, K, I, N] of query block x and key block y, with a finite floor for −∞."""
    call, pick = blocked.call, lambda segments, n: None if segments is None else segments[n]
    s_BKIN = _product("bkir,bknr->bkin", call.q[x], call.k[y])
    if call.g is not None:
        s_BKIN += _product("bgid,bnd->bgin", call.g[x], call.h[y][:, 0])
    s_BKIN *= options.c
    distance_IN = blocked.distance(x, y)
    seen = visible(distance_IN, pick(blocked.query_segments, x), pick(blocked.key_segments, y))
    s_BKIN += call.scores.bias(distance_IN, s_BKIN.dtype)[None]
    return jnp.where(in_front(seen, 4), s_BKIN, jnp.finfo(s_BKIN.dtype).min / 2)


def _probabilities(blocked: Blocked, lse_XBKI, x, y, options: Options):
    return jnp.exp(_scores(blocked, x, y, options) - lse_XBKI[x][..., None])


def _product(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=accumulator(a.dtype))


# The sweeps.


def _sweep_forward(blocked: Blocked, options: Options):
    call, rows = blocked.call, blocked.call.q.shape[:-1]
    dtype = accumulator(call.q.dtype)

    def visit(carry, x, y):
        peak, total, o = carry
        s_BKIN = _scores(blocked, x, y, options)
        old_peak = peak[x]
        new_peak = jnp.maximum(old_peak, s_BKIN.max(-1))
        weight_BKIN = jnp.exp(s_BKIN - new_peak[..., None])
        keep = jnp.exp(old_peak - new_peak)
        v_BKNR = call.k[y] if call.v is None else call.v[y]
        fresh_o = _product("bkin,bknr->bkir", weight_BKIN.astype(v_BKNR.dtype), v_BKNR)
        return (
            peak.at[x].set(new_peak),
            total.at[x].set(total[x] * keep + weight_BKIN.sum(-1)),
            o.at[x].set(o[x] * keep[..., None] + fresh_o),
        )

    start = (
        jnp.full(rows, jnp.finfo(dtype).min / 2, dtype),
        jnp.zeros(rows, dtype),
        jnp.zeros(call.q.shape, dtype),
    )
    peak, total, o = blocked.sweep(visit, start)
    return peak + jnp.log(total), o / total[..., None]


def _sweep_average(blocked: Blocked, lse_XBKI, options: Options):
    """Return a_i = Σ_j p_ij h_j, in a second sweep: a sum over heads needs every head's lse."""
    h = blocked.call.h
    count, batch, all_heads, queries = lse_XBKI.shape
    heads = 1 if options.average == "summed" else all_heads

    def visit(a, x, y):
        p_BKIN = _probabilities(blocked, lse_XBKI, x, y, options)
        p_BCIN = _shared(p_BKIN, heads).astype(h.dtype)
        return a.at[x].add(_product("bcin,bnd->bcid", p_BCIN, h[y][:, 0]))

    start = jnp.zeros((count, batch, heads, queries, h.shape[-1]), lse_XBKI.dtype)
    return blocked.sweep(visit, start)


def _sweep_delta(blocked: Blocked, lse_XBKI, e_XBCID, options: Options):
    """Return Σ_j p_ij E_ij for each head, [X, B, K, I]."""

    def visit(delta, x, y):
        p_BKIN = _probabilities(blocked, lse_XBKI, x, y, options)
        e_BCIN = _product("bcid,bnd->bcin", e_XBCID[x], blocked.call.h[y][:, 0])
        return delta.at[x].add((p_BKIN * e_BCIN).sum(-1))

    return blocked.sweep(visit, jnp.zeros_like(lse_XBKI))


def _sweep_backward(
    blocked: Blocked, lse_XBKI, delta_XBKI, do_XBKIR, e_XBCID, options: Options
) -> Call:
    call, dtype = blocked.call, lse_XBKI.dtype

    def visit(grads: Call, x, y):
        q, k, do = call.q[x], call.k[y], do_XBKIR[x]
        v = k if call.v is None else call.v[y]
        p = _probabilities(blocked, lse_XBKI, x, y, options)
        dp = _product("bkir,bknr->bkin", do, v)
        if e_XBCID is not None:
            dp += _product("bcid,bnd->bcin", e_XBCID[x], call.h[y][:, 0])
        ds = p * (dp - delta_XBKI[x][..., None])
        dscores = call.scores.bias_gradient(ds.sum(0), blocked.distance(x, y))
        grads = grads._replace(scores=jax.tree.map(jnp.add, grads.scores, dscores))
        scaled = options.c * ds
        ds, p_low = scaled.astype(q.dtype), p.astype(q.dtype)
        dk = _product("bkin,bkir->bknr", ds, q)
        dv = _product("bkin,bkir->bknr", p_low, do)
        if call.v is None:
            dk += dv
        else:
            grads = grads._replace(v=grads.v.at[y].add(dv))
        grads = grads._replace(
            q=grads.q.at[x].add(_product("bkin,bknr->bkir", ds, k)), k=grads.k.at[y].add(dk)
        )
        if call.g is None:
            return grads
        g, h = call.g[x], call.h[y][:, 0]
        ds_BGIN = _shared(scaled, g.shape[1]).astype(q.dtype)
        dh = _product("bgin,bgid->bnd", ds_BGIN, g)
        if e_XBCID is not None:
            p_BCIN = _shared(p, e_XBCID.shape[2]).astype(q.dtype)
            dh += _product("bcin,bcid->bnd", p_BCIN, e_XBCID[x])
        return grads._replace(
            g=grads.g.at[x].add(_product("bgin,bnd->bgid", ds_BGIN, h)),
            h=grads.h.at[y].add(dh[:, None]),
        )

    start = jax.tree.map(lambda t: jnp.zeros(t.shape, dtype), call)
    return blocked.sweep(visit, start)


def _shared(t_BKIN, heads: int):
    """Sum over the heads if they share one tile."""
    return t_BKIN.sum(1, keepdims=True) if heads == 1 else t_BKIN


# Cutting into blocks and joining again. Padding comes after every real position, so no real query
# sees a padded key.


def _cut(call: Call, options: Options, window: Window) -> Blocked:
    queries, keys = options.block_sizes
    cut = lambda x, size: None if x is None else _cut_positions(x, size)
    one_head = lambda x: None if x is None else x[:, :, None]
    segments, dtype = call.scores.segments, accumulator(call.q.dtype)
    query_segments = key_segments = None
    if segments is not None:
        positions_XI = window.starts[:, None] + np.arange(queries)[None]
        taken_BXI = jnp.take(segments, positions_XI, axis=1, mode="fill", fill_value=-1)
        query_segments = taken_BXI.transpose(1, 0, 2)
        key_segments = _cut_heads_first(segments[:, None], keys, padding=-1)[:, :, 0]
    call = Call(
        q=cut(call.q, queries),
        k=cut(call.k, keys),
        v=cut(call.v, keys),
        g=cut(call.g if call.per_head else one_head(call.g), queries),
        h=cut(one_head(call.h), keys),
        # sums of their gradients are as wide as the scores
        scores=jax.tree.map(lambda x: x.astype(dtype), call.floating.scores),
    )
    return Blocked(call, query_segments, key_segments, window)


def _cut_positions(x_BJKR, size: int, padding=0):
    """Pad and cut [B, J, K, R] into [X, B, K, I, R]."""
    batch, positions, heads, width = x_BJKR.shape
    count = -(-positions // size)
    missing = ((0, 0), (0, count * size - positions), (0, 0), (0, 0))
    x = jnp.pad(x_BJKR, missing, constant_values=padding)
    return x.reshape(batch, count, size, heads, width).transpose(1, 0, 3, 2, 4)


def _join(x_XBKIR, positions: int):
    """Join [X, B, K, I, R] into [B, J, K, R]."""
    count, batch, heads, size, width = x_XBKIR.shape
    x = x_XBKIR.transpose(1, 0, 3, 2, 4).reshape(batch, count * size, heads, width)
    return x[:, :positions]


def _cut_heads_first(x_BKJ, size: int, padding=0):
    """Pad and cut [B, K, J] into [X, B, K, I]."""
    return _cut_positions(jnp.swapaxes(x_BKJ, 1, 2)[..., None], size, padding)[..., 0]


def _join_heads_first(x_XBKI, positions: int):
    """Join [X, B, K, I] into [B, K, J]."""
    return jnp.swapaxes(_join(x_XBKI[..., None], positions)[..., 0], 1, 2)


def _uncut_gradients(grads: Call, call: Call) -> Call:
    joined = {
        name: _join(x, getattr(call, name).shape[1]).reshape(getattr(call, name).shape)
        for name in ("q", "k", "v", "g", "h")
        if (x := getattr(grads, name)) is not None
    }
    return grads._replace(**joined).as_gradient_of(call)

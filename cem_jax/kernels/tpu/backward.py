"""Attention, its keys as values, on a TPU: the resident backward kernel, one sweep over the tiles.

One program a batch element and block of queries, in order of position; all heads inside. Legend and
layouts: `tpu_tiles`; `tpu_streamed_backward` does the same to each tile. Per tile and head, with S̄
the sum over heads of dS where they share g:

    p = exp(s − lse)        dS = p (v·doᵀ + E − Δ)      E = h·eᵀ, e the context's cotangent
    dqᵀ += kᵀ dS            dkᵀ += qᵀ dSᵀ + doᵀ pᵀ      (dvᵀ += doᵀ pᵀ with values of their own)
    dgᵀ += hᵀ S̄             dhᵀ += gᵀ S̄ᵀ + eᵀ Aᵀ        A = Σ_k p

dk and dh stay in VMEM over the query blocks of a batch element and are written once, so sums run in
one order. Δ = do·o − dlse + Σ_j p E; its last part takes a sweep of its own before, the rest is an
input.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cem_jax.kernels.tpu.layout import flat, given, gradients
from cem_jax.kernels.tpu.plan import LANES, Sizes
from cem_jax.kernels.tpu.tiles import (
    LOG2E,
    Tile,
    for_each_head,
    for_each_tile,
    head_slice,
    lay_out_diagonal,
    lay_out_heads,
    lay_out_segments,
    product,
    query_bias,
    share_scores,
    span,
)

STREAMED = False
BLOCKS = ((512, 512), (512, 256), (256, 256))  # smaller ones are slower than streaming
HEADS_TOGETHER = 2
operand = flat


def arrays(sizes: Sizes):
    """Names of what comes in and goes out."""
    cotangents = ("do", *(("da",) if sizes.exact else ()))
    return (*given(sizes), "lse", "delta", *cotangents), gradients(sizes)


def scratch(sizes: Sizes) -> dict:
    """(shape, dtype) of what the kernel keeps."""
    heads, rows, positions, queries = sizes.heads, sizes.rows, sizes.positions, sizes.queries
    model, dtype, f32 = sizes.model, sizes.dtype, jnp.float32
    of_queries, of_keys = (heads, rows, queries), (heads, rows, positions)
    kept = sums(sizes) | dict(
        k=((heads, positions, rows), dtype),
        kT=(of_keys, dtype),
        qT=(of_queries, dtype),
        doT=(of_queries, dtype),
        dkT=(of_keys, f32),
    )
    if sizes.values:
        kept |= dict(v=((heads, positions, rows), dtype), dvT=(of_keys, f32))
    if sizes.diagonal != "none":
        kept |= dict(
            h=((positions, model), dtype),
            hT=((model, positions), dtype),
            dhT=((model, positions), f32),
        )
    if sizes.diagonal == "per_head":
        kept |= dict(gT=((heads, model, queries), dtype))
    if sizes.exact:
        kept |= dict(eT=((model, queries), dtype))
    if sizes.segments:
        kept |= dict(segment_columns=((positions, LANES), jnp.int32))
    return kept


def sums(sizes: Sizes) -> dict:
    """(shape, dtype) of what a block of queries adds up, and of what the heads of a tile share."""
    of_queries = lambda *rows: ((*rows, sizes.queries), jnp.float32)
    tile = of_queries(sizes.keys)
    kept = dict(
        minus_lse=of_queries(sizes.heads, 1),  # −lse without the query's bias, times log₂e
        delta=of_queries(sizes.heads, 1),
        dqT=of_queries(sizes.heads, sizes.rows),
        shared=tile,
    )
    if sizes.diagonal == "shared":
        kept |= dict(dgT=of_queries(sizes.model), ds_sum=tile)
    elif sizes.diagonal == "per_head":
        kept |= dict(dgT=of_queries(sizes.heads, sizes.model))
    if sizes.exact:
        kept |= dict(p_sum=tile, context=tile)
    return kept


def kernel(inputs: dict, outputs: dict, kept: dict, *, sizes: Sizes):
    i = pl.program_id(1)
    refs = {**kept, **{n: inputs[n] for n in ("slopes", "self_bias", "segments") if n in inputs}}
    refs |= {n: outputs[n] for n in ("dslopes", "dself_bias") if n in outputs}
    pl.when(i == 0)(lambda: clear(refs, "dkT", "dvT", "dhT", "dslopes", "dself_bias"))
    _lay_out(inputs, refs, i, sizes)
    start_queries(inputs, refs, sizes)
    if sizes.exact:
        for_each_tile(lambda tile: complete_delta(tile, refs), i, sizes)
    for_each_tile(lambda tile: visit(tile, refs), i, sizes)
    finish_queries(outputs, refs, sizes)
    pl.when(i == pl.num_programs(1) - 1)(lambda: _finish_keys(outputs, refs, sizes))


def clear(refs: dict, *names):
    """Zeros into those that there are."""
    for name in names:
        if name in refs:
            refs[name][...] = jnp.zeros(refs[name].shape, refs[name].dtype)


def _lay_out(inputs: dict, refs: dict, i, sizes: Sizes):
    start = i * sizes.queries
    lay_out_heads(inputs["q"], sizes, rows=(refs["qT"], 0))
    lay_out_heads(inputs["k"], sizes, columns=(refs["k"], start), rows=(refs["kT"], start))
    if sizes.values:
        lay_out_heads(inputs["v"], sizes, columns=(refs["v"], start))
    lay_out_diagonal(inputs, refs, start, sizes)
    if sizes.exact:
        refs["eT"][...] = inputs["da"][...]
    if sizes.segments:
        lay_out_segments(refs["segments"], refs["segment_columns"], start, sizes)
    lay_out_heads(inputs["do"], sizes, rows=(refs["doT"], 0))


def start_queries(inputs: dict, refs: dict, sizes: Sizes):
    """Of a block: what its rows are computed with, and nothing added up yet."""
    clear(refs, "dqT", "dgT")
    for head in range(sizes.heads):
        row = slice(head, head + 1)
        refs["delta"][head] = inputs["delta"][row, :]
        lse_1I = inputs["lse"][row, :]
        if sizes.slopes:
            lse_1I = lse_1I + query_bias(refs["slopes"], head, sizes)
        refs["minus_lse"][head] = lse_1I * -LOG2E


def _probabilities(strip: Tile, refs: dict, head):
    return jnp.exp2(strip.scores(refs, head) + refs["minus_lse"][head, :, strip.lanes])


def _share_context(strips: list, refs: dict):
    """E_ij = e_i·h_j of each strip."""
    for strip in strips:
        eT_DI = refs["eT"][:, strip.lanes]
        context_NI = product(refs["h"][strip.keys], eT_DI, (1, 0), strip.sizes)
        refs["context"][strip.rows, strip.lanes] = context_NI


def complete_delta(tile: Tile, refs: dict):
    """Δ += Σ_j p E over one tile."""
    strips = tile.strips()
    share_scores(strips, refs)
    _share_context(strips, refs)

    def add(head):
        for strip in strips:
            p_NI = _probabilities(strip, refs, head)
            mean_1I = (p_NI * refs["context"][strip.rows, strip.lanes]).sum(0, keepdims=True)
            refs["delta"][head, :, strip.lanes] += mean_1I

    for_each_head(add, tile.sizes, HEADS_TOGETHER)


def visit(tile: Tile, refs: dict):
    """Every gradient's part from one tile."""
    sizes = tile.sizes
    strips = tile.strips()
    share_scores(strips, refs)
    if sizes.exact:
        _share_context(strips, refs)
    clear(refs, "ds_sum", "p_sum")

    def add(head):
        for strip in strips:
            _visit_strip(strip, refs, head)

    for_each_head(add, sizes, HEADS_TOGETHER)
    # a whole tile in one product each; on the diagonal, strips see different keys
    for part in [tile] if tile.behind is None else strips:
        _add_shared_gradients(part, refs)


def _visit_strip(strip: Tile, refs: dict, head):
    sizes, lanes = strip.sizes, strip.lanes
    p_NI = _probabilities(strip, refs, head)
    values_NS = refs["v" if sizes.values else "k"][head, strip.keys]
    dp_NI = product(values_NS, refs["doT"][head, :, lanes], (1, 0), sizes)
    if sizes.exact:
        dp_NI = dp_NI + refs["context"][strip.rows, lanes]
        refs["p_sum"][strip.rows, lanes] += p_NI
    ds_NI = p_NI * (dp_NI - refs["delta"][head, :, lanes])
    _add_bias_gradients(strip, refs, head, ds_NI)
    if sizes.diagonal == "shared":
        refs["ds_sum"][strip.rows, lanes] += ds_NI
    scaled_NI = (ds_NI * sizes.c).astype(sizes.dtype)
    _add_head_gradients(strip, refs, head, scaled_NI, p_NI.astype(sizes.dtype))


def _add_head_gradients(strip: Tile, refs: dict, head, ds_NI, p_NI):
    sizes, lanes, keys = strip.sizes, strip.lanes, strip.keys
    refs["dqT"][head, :, lanes] += product(refs["kT"][head, :, keys], ds_NI, (1, 0), sizes)
    if sizes.diagonal == "per_head":
        refs["dgT"][head, :, lanes] += product(refs["hT"][:, keys], ds_NI, (1, 0), sizes)
        refs["dhT"][:, keys] += product(refs["gT"][head, :, lanes], ds_NI, (1, 1), sizes)
    qT_SI, doT_SI = (refs[name][head, :, lanes] for name in ("qT", "doT"))
    if sizes.values:
        refs["dkT"][head, :, keys] += product(qT_SI, ds_NI, (1, 1), sizes)
        refs["dvT"][head, :, keys] += product(doT_SI, p_NI, (1, 1), sizes)
        return
    # one product over both: their sum is not read and written twice
    both_S2I = jnp.concatenate([qT_SI, doT_SI], axis=1)
    both_N2I = jnp.concatenate([ds_NI, p_NI], axis=1)
    refs["dkT"][head, :, keys] += product(both_S2I, both_N2I, (1, 1), sizes)


def _add_shared_gradients(part: Tile, refs: dict):
    """What sums over heads give: dg and dh from S̄, and dh from A."""
    sizes, lanes, keys = part.sizes, part.lanes, part.keys
    if sizes.diagonal == "shared":
        ds_NI = (refs["ds_sum"][part.rows, lanes] * sizes.c).astype(sizes.dtype)
        refs["dgT"][:, lanes] += product(refs["hT"][:, keys], ds_NI, (1, 0), sizes)
        refs["dhT"][:, keys] += product(refs["gT"][:, lanes], ds_NI, (1, 1), sizes)
    if sizes.exact:
        p_NI = refs["p_sum"][part.rows, lanes].astype(sizes.dtype)
        refs["dhT"][:, keys] += product(refs["eT"][:, lanes], p_NI, (1, 1), sizes)


def _add_bias_gradients(strip: Tile, refs: dict, head, ds_NI):
    """dm = −Σ (i − j) dS and dβ = Σ_i dS_ii, a sum for each lane."""
    sizes, lanes = strip.sizes, strip.lanes
    if sizes.slopes:
        distance_NI = strip.distance().astype(jnp.float32)
        refs["dslopes"][head, :, lanes] -= (ds_NI * distance_NI).sum(0, keepdims=True)
    if sizes.self_bias and strip.crossing:
        own_NI = jnp.where(strip.distance() == 0, ds_NI, 0.0)
        refs["dself_bias"][head, :, lanes] += own_NI.sum(0, keepdims=True)


def finish_queries(outputs: dict, refs: dict, sizes: Sizes):
    for head in range(sizes.heads):
        dq_RI = refs["dqT"][head, : sizes.width]
        outputs["dq"][head_slice(head, sizes.width), :] = dq_RI.astype(sizes.dtype)
        if sizes.diagonal == "per_head":
            dg_DI = refs["dgT"][head].astype(sizes.dtype)
            outputs["dg"][head_slice(head, sizes.model), :] = dg_DI
    if sizes.diagonal == "shared":
        outputs["dg"][...] = refs["dgT"][...].astype(sizes.dtype)


def _finish_keys(outputs: dict, refs: dict, sizes: Sizes):
    """Block after block, so that the code stays as long as one block's."""

    def write(n, _):
        block = span(n * sizes.queries, sizes.queries)
        for name, kept in (("dk", "dkT"), ("dv", "dvT")):
            for head in range(sizes.heads if kept in refs else 0):
                d_RN = refs[kept][head, : sizes.width, block]
                outputs[name][head_slice(head, sizes.width), block] = d_RN.astype(sizes.dtype)
        if sizes.diagonal != "none":
            outputs["dh"][:, block] = refs["dhT"][:, block].astype(sizes.dtype)
        return 0

    lax.fori_loop(0, sizes.positions // sizes.queries, write, 0)

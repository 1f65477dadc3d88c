"""Attention, its keys as values, on a TPU: the backward kernel, one sweep over the tiles.

One program a batch element and block of queries, in order of position; all heads inside. Legend and
layouts: `tpu_tiles`. Per tile and head, with S̄ the sum over heads of dS where they share g:

    p = exp(s − lse)        dS = p (v·doᵀ + E − Δ)      E = h·eᵀ, e the context's cotangent
    dqᵀ += kᵀ dS            dkᵀ += qᵀ dSᵀ + doᵀ pᵀ      (dvᵀ += doᵀ pᵀ with values of their own)
    dgᵀ += hᵀ S̄             dhᵀ += gᵀ S̄ᵀ + eᵀ Aᵀ        A = Σ_k p

dk and dh stay in VMEM over the query blocks of a batch element and are written once, so sums run in
one order. Δ = do·o − dlse + Σ_j p E; its last part takes a sweep of its own before.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cem_jax.kernels.tpu_call import given
from cem_jax.kernels.tpu_plan import LANES, Sizes
from cem_jax.kernels.tpu_tiles import (
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
    span,
)

HEADS_TOGETHER = 2


def arrays(sizes: Sizes):
    """Names of what comes in and goes out."""
    inputs = given(sizes)
    cotangents = ("dlse", "do", *(("da",) if sizes.exact else ()))
    gradients = tuple(f"d{name}" for name in inputs if name != "segments")
    return (*inputs, "lse", "o", *cotangents), gradients


def scratch(sizes: Sizes) -> dict:
    """(shape, dtype) of what the kernel keeps."""
    heads, rows, positions, queries = sizes.heads, sizes.rows, sizes.positions, sizes.queries
    model, dtype, f32 = sizes.model, sizes.dtype, jnp.float32
    tile = ((sizes.keys, queries), f32)
    of_queries, of_keys = (heads, rows, queries), (heads, rows, positions)
    kept = dict(
        k=((heads, positions, rows), dtype),
        kT=(of_keys, dtype),
        qT=(of_queries, dtype),
        doT=(of_queries, dtype),
        minus_lse=((heads, 1, queries), f32),  # −lse without the query's bias, times log₂e
        delta=((heads, 1, queries), f32),
        dqT=(of_queries, f32),
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
    if sizes.diagonal == "shared":
        kept |= dict(dgT=((model, queries), f32), ds_sum=tile)
    elif sizes.diagonal == "per_head":
        kept |= dict(gT=((heads, model, queries), dtype), dgT=((heads, model, queries), f32))
    if sizes.exact:
        kept |= dict(eT=((model, queries), dtype), p_sum=tile)
    if sizes.segments:
        kept |= dict(segment_columns=((positions, LANES), jnp.int32))
    return kept


def kernel(inputs: dict, outputs: dict, kept: dict, *, sizes: Sizes):
    i = pl.program_id(1)
    refs = {**kept, **{n: inputs[n] for n in ("slopes", "self_bias", "segments") if n in inputs}}
    refs |= {n: outputs[n] for n in ("dslopes", "dself_bias") if n in outputs}
    pl.when(i == 0)(lambda: _start(refs, sizes))
    _lay_out(inputs, refs, i, sizes)
    for name in ("dqT", "dgT"):
        if name in refs:
            refs[name][...] = jnp.zeros_like(refs[name])
    if sizes.exact:
        for_each_tile(lambda tile: _complete_delta(tile, refs), i, sizes)
    for_each_tile(lambda tile: _visit(tile, refs), i, sizes)
    _finish_queries(outputs, refs, sizes)
    pl.when(i == pl.num_programs(1) - 1)(lambda: _finish_keys(outputs, refs, sizes))


def _start(refs: dict, sizes: Sizes):
    for name in ("dkT", "dvT", "dhT", "dslopes", "dself_bias"):
        if name in refs:
            refs[name][...] = jnp.zeros_like(refs[name])


def _lay_out(inputs: dict, refs: dict, i, sizes: Sizes):
    start = i * sizes.queries
    lay_out_heads(inputs["q"], sizes, rows=(refs["qT"], 0))
    lay_out_heads(inputs["k"], sizes, columns=(refs["k"], start), rows=(refs["kT"], start))
    if sizes.values:
        lay_out_heads(inputs["v"], sizes, columns=(refs["v"], start))
    lay_out_diagonal(inputs, refs, start, sizes)
    if sizes.exact:
        refs["eT"][...] = inputs["da"][...].astype(sizes.dtype)
    if sizes.segments:
        lay_out_segments(refs["segments"], refs["segment_columns"], start, sizes)
    # do is rounded first: do·k − do·o of a row that sees one key is then 0 in low precision too
    do_DI = inputs["do"][...].astype(sizes.dtype)
    lay_out_heads(do_DI, sizes, rows=(refs["doT"], 0))
    do_o_DI = do_DI.astype(jnp.float32) * inputs["o"][...]
    for head in range(sizes.heads):
        do_o_1I = do_o_DI[head_slice(head, sizes.width)].sum(0, keepdims=True)
        row = slice(head, head + 1)
        refs["delta"][head] = do_o_1I - inputs["dlse"][row, :]
        lse_1I = inputs["lse"][row, :]
        if sizes.slopes:
            lse_1I = lse_1I + query_bias(refs["slopes"], head, sizes)
        refs["minus_lse"][head] = lse_1I * -LOG2E


def _probabilities(tile: Tile, refs: dict, head, common_NI):
    s_NI = tile.scores(refs, head, common_NI)
    return jnp.exp2(s_NI + refs["minus_lse"][head, :, tile.lanes])


def _context_scores(tile: Tile, refs: dict):
    """E_ij = e_i·h_j. [N, I]."""
    return product(refs["h"][tile.keys], refs["eT"][:, tile.lanes], (1, 0), tile.sizes)


def _complete_delta(tile: Tile, refs: dict):
    """Δ += Σ_j p E over one tile."""
    sizes, lanes = tile.sizes, tile.lanes
    shared_NI = None if sizes.diagonal == "per_head" else tile.common(refs)
    context_NI = _context_scores(tile, refs)

    def visit(head):
        common_NI = tile.common(refs, head) if sizes.diagonal == "per_head" else shared_NI
        p_NI = _probabilities(tile, refs, head, common_NI)
        refs["delta"][head, :, lanes] += (p_NI * context_NI).sum(0, keepdims=True)

    for_each_head(visit, sizes, HEADS_TOGETHER)


def _visit(tile: Tile, refs: dict):
    sizes, lanes = tile.sizes, tile.lanes
    per_head = sizes.diagonal == "per_head"
    shared_NI = None if per_head else tile.common(refs)
    context_NI = _context_scores(tile, refs) if sizes.exact else None
    for name in ("ds_sum", "p_sum"):
        if name in refs:
            refs[name][:, lanes] = jnp.zeros(tile.shape, jnp.float32)

    def visit(head):
        common_NI = tile.common(refs, head) if per_head else shared_NI
        p_NI = _probabilities(tile, refs, head, common_NI)
        values = refs["v" if sizes.values else "k"]
        dp_NI = product(values[head, tile.keys], refs["doT"][head, :, lanes], (1, 0), sizes)
        if sizes.exact:
            dp_NI = dp_NI + context_NI
            refs["p_sum"][:, lanes] += p_NI
        ds_NI = p_NI * (dp_NI - refs["delta"][head, :, lanes])
        _add_bias_gradients(tile, refs, head, ds_NI)
        if sizes.diagonal == "shared":
            refs["ds_sum"][:, lanes] += ds_NI
        scaled_NI = (ds_NI * sizes.c).astype(sizes.dtype)
        _add_head_gradients(tile, refs, head, scaled_NI, p_NI.astype(sizes.dtype))
        if per_head:
            refs["dgT"][head, :, lanes] += product(
                refs["hT"][:, tile.keys], scaled_NI, (1, 0), sizes
            )
            gT_DI = refs["gT"][head, :, lanes]
            refs["dhT"][:, tile.keys] += product(gT_DI, scaled_NI, (1, 1), sizes)

    for_each_head(visit, sizes, HEADS_TOGETHER)
    if sizes.diagonal == "shared":
        ds_NI = (refs["ds_sum"][:, lanes] * sizes.c).astype(sizes.dtype)
        refs["dgT"][:, lanes] += product(refs["hT"][:, tile.keys], ds_NI, (1, 0), sizes)
        refs["dhT"][:, tile.keys] += product(refs["gT"][:, lanes], ds_NI, (1, 1), sizes)
    if sizes.exact:
        p_NI = refs["p_sum"][:, lanes].astype(sizes.dtype)
        refs["dhT"][:, tile.keys] += product(refs["eT"][:, lanes], p_NI, (1, 1), sizes)


def _add_head_gradients(tile: Tile, refs: dict, head, ds_NI, p_NI):
    sizes, lanes = tile.sizes, tile.lanes
    kT_SN, qT_SI, doT_SI = (
        refs["kT"][head, :, tile.keys],
        refs["qT"][head, :, lanes],
        refs["doT"][head, :, lanes],
    )
    refs["dqT"][head, :, lanes] += product(kT_SN, ds_NI, (1, 0), sizes)
    if sizes.values:
        refs["dkT"][head, :, tile.keys] += product(qT_SI, ds_NI, (1, 1), sizes)
        refs["dvT"][head, :, tile.keys] += product(doT_SI, p_NI, (1, 1), sizes)
        return
    # one product over both: their sum is not read and written twice
    both_S2I = jnp.concatenate([qT_SI, doT_SI], axis=1)
    both_N2I = jnp.concatenate([ds_NI, p_NI], axis=1)
    refs["dkT"][head, :, tile.keys] += product(both_S2I, both_N2I, (1, 1), sizes)


def _add_bias_gradients(tile: Tile, refs: dict, head, ds_NI):
    """dm = −Σ (i − j) dS and dβ = Σ_i dS_ii, a sum for each lane."""
    sizes, lanes = tile.sizes, tile.lanes
    if sizes.slopes:
        distance_NI = tile.distance().astype(jnp.float32)
        refs["dslopes"][head, :, lanes] -= (ds_NI * distance_NI).sum(0, keepdims=True)
    if sizes.self_bias and tile.crossing:
        own_NI = jnp.where(tile.distance() == 0, ds_NI, 0.0)
        refs["dself_bias"][head, :, lanes] += own_NI.sum(0, keepdims=True)


def _finish_queries(outputs: dict, refs: dict, sizes: Sizes):
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

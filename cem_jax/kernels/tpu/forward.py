"""Attention, its keys as values, on a TPU: the resident forward kernel, with all keys in VMEM.

One program a batch element and block of queries, in order of position; all heads inside. Legend and
layouts: `tpu_tiles`; `tpu_streamed_forward` does the same to each tile. Per tile and head, with the
running maximum M and total l of a query:

    s = k·qᵀ + C     C = h·gᵀ once for all heads     p = exp(s − M)     oᵀ += vᵀ p     l += Σ p

With a context, a second sweep adds up A = Σ_k p/l, and aᵀ = hᵀ A.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from cem_jax.kernels.tpu.layout import flat, given
from cem_jax.kernels.tpu.plan import LANES, Sizes
from cem_jax.kernels.tpu.tiles import (
    LN2,
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
)

STREAMED = False
BLOCKS = ((512, 512), (512, 256))  # smaller ones are slower than streaming: docs/kernels-tpu.md
HEADS_TOGETHER = 6
operand = flat


def arrays(sizes: Sizes):
    """Names of what comes in and goes out."""
    return given(sizes), ("lse", "o", *(("a",) if sizes.exact else ()))


def scratch(sizes: Sizes) -> dict:
    """(shape, dtype) of what the kernel keeps."""
    heads, rows, positions, queries = sizes.heads, sizes.rows, sizes.positions, sizes.queries
    dtype = sizes.dtype
    kept = sums(sizes) | dict(
        k=((heads, positions, rows), dtype),
        vT=((heads, rows, positions), dtype),
        qT=((heads, rows, queries), dtype),
    )
    if sizes.diagonal != "none":
        kept |= dict(h=((positions, sizes.model), dtype))
    if sizes.diagonal == "per_head":
        kept |= dict(gT=((heads, sizes.model, queries), dtype))
    if sizes.exact:
        kept |= dict(hT=((sizes.model, positions), dtype))
    if sizes.segments:
        kept |= dict(segment_columns=((positions, LANES), jnp.int32))
    return kept


def sums(sizes: Sizes) -> dict:
    """(shape, dtype) of what a block of queries adds up, and of what the heads of a tile share."""
    of_queries = lambda *rows: ((*rows, sizes.queries), jnp.float32)
    kept = dict(
        peak=of_queries(sizes.heads, 1),
        total=of_queries(sizes.heads, 1),
        oT=of_queries(sizes.heads, sizes.rows),
        shared=of_queries(sizes.keys),
    )
    if sizes.exact:
        kept |= dict(aT=of_queries(sizes.model), shares=of_queries(sizes.keys))
    return kept


def kernel(inputs: dict, outputs: dict, kept: dict, *, sizes: Sizes):
    i = pl.program_id(1)
    refs = {**kept, **{n: inputs[n] for n in ("slopes", "self_bias", "segments") if n in inputs}}
    _lay_out(inputs, refs, i, sizes)
    start(refs)
    for_each_tile(lambda tile: attend_to(tile, refs), i, sizes)
    finish(outputs, refs, sizes)
    if sizes.exact:
        for_each_tile(lambda tile: average(tile, refs), i, sizes)
        outputs["a"][...] = refs["aT"][...]


def _lay_out(inputs: dict, refs: dict, i, sizes: Sizes):
    start = i * sizes.queries
    lay_out_heads(inputs["q"], sizes, rows=(refs["qT"], 0))
    if sizes.values:
        lay_out_heads(inputs["k"], sizes, columns=(refs["k"], start))
        lay_out_heads(inputs["v"], sizes, rows=(refs["vT"], start))
    else:
        both = dict(columns=(refs["k"], start), rows=(refs["vT"], start))
        lay_out_heads(inputs["k"], sizes, **both)
    lay_out_diagonal(inputs, refs, start, sizes)
    if sizes.segments:
        lay_out_segments(refs["segments"], refs["segment_columns"], start, sizes)


def start(refs: dict):
    """Of a block of queries."""
    refs["peak"][...] = jnp.full_like(refs["peak"], -jnp.inf)
    for name in ("total", "oT", "aT"):
        if name in refs:
            refs[name][...] = jnp.zeros_like(refs[name])


def attend_to(tile: Tile, refs: dict):
    sizes = tile.sizes
    strips = tile.strips()
    share_scores(strips, refs)

    def visit(head):
        found = [(strip.lanes, _attend_strip(strip, refs, head)) for strip in strips]

        def write():
            for lanes, values in found:
                for name, x in values.items():
                    refs[name][head, :, lanes] = x

        return write

    for_each_head(visit, sizes, HEADS_TOGETHER)


def _attend_strip(strip: Tile, refs: dict, head) -> dict:
    """The head's maxima, totals and averages, brought up to this strip's keys."""
    sizes, lanes = strip.sizes, strip.lanes
    s_NI = strip.scores(refs, head)
    old_1I = refs["peak"][head, :, lanes]
    new_1I = jnp.maximum(old_1I, s_NI.max(0, keepdims=True))
    p_NI = jnp.exp2(s_NI - new_1I)
    keep_1I = jnp.exp2(old_1I - new_1I)
    fresh_SI = product(refs["vT"][head, :, strip.keys], p_NI.astype(sizes.dtype), (1, 0), sizes)
    return dict(
        peak=new_1I,
        total=refs["total"][head, :, lanes] * keep_1I + p_NI.sum(0, keepdims=True),
        oT=refs["oT"][head, :, lanes] * keep_1I + fresh_SI,
    )


def finish(outputs: dict, refs: dict, sizes: Sizes):
    """lse and o, once every tile was attended to."""
    for head in range(sizes.heads):
        total_1I = refs["total"][head]
        lse_1I = refs["peak"][head] * LN2 + jnp.log(total_1I)
        if sizes.slopes:
            lse_1I = lse_1I - query_bias(refs["slopes"], head, sizes)
        outputs["lse"][head : head + 1, :] = lse_1I
        o_RI = refs["oT"][head, : sizes.width] / total_1I
        outputs["o"][head_slice(head, sizes.width), :] = o_RI


def average(tile: Tile, refs: dict):
    """aᵀ += hᵀ A over one tile, once the softmax of every head is known."""
    sizes = tile.sizes
    strips = tile.strips()
    share_scores(strips, refs)
    refs["shares"][...] = jnp.zeros_like(refs["shares"])

    def visit(head):
        for strip in strips:
            lanes = strip.lanes
            log2_sum_1I = refs["peak"][head, :, lanes] + jnp.log2(refs["total"][head, :, lanes])
            p_NI = jnp.exp2(strip.scores(refs, head) - log2_sum_1I)
            refs["shares"][strip.rows, lanes] += p_NI

    for_each_head(visit, sizes, HEADS_TOGETHER)
    for strip in strips:
        shares_NI = refs["shares"][strip.rows, strip.lanes].astype(sizes.dtype)
        hT_DN = refs["hT"][:, strip.keys]
        refs["aT"][:, strip.lanes] += product(hT_DN, shares_NI, (1, 0), sizes)

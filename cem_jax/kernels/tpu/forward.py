"""The forward kernels of attention on a TPU.

Both do the same work per tile, for all heads. The resident kernel has all keys in VMEM: one program
per batch element and query block, in order of position. The streamed kernel has one key block: one
program per batch element, query block, sweep and key block, from the diagonal back to the first;
its operands are already laid out, so VMEM holds only blocks and one query block's sums, for any J.
Legend: `tiles`; layouts: `layout`. Per tile and head, with the running maximum M
and total l of a query:

    s = k·qᵀ + C     C = h·gᵀ once for all heads     p = exp(s − M)     oᵀ += vᵀ p     l += Σ p

With an average of h, a second sweep computes A = Σ_k p/l, and aᵀ = hᵀ A.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from cem_jax.kernels.tpu import layout, tiles
from cem_jax.kernels.tpu.layout import Kernel, Program, Sizes
from cem_jax.kernels.tpu.tiles import Refs, Tile

HEADS_TOGETHER = 6


def _outputs(sizes: Sizes) -> tuple[str, ...]:
    return ("lse", "o", *(("a",) if sizes.average else ()))


def _operands(sizes: Sizes) -> tuple[str, ...]:
    """Return the names of the laid-out arrays that tiles read, other than the values."""
    segments = sizes.scores.segments
    has = dict(gT=sizes.model, h=sizes.model, hT=sizes.average, segment_columns=segments)
    return ("qT", "k", *(name for name, present in has.items() if present))


def _sums(sizes: Sizes) -> dict:
    """Return (shape, dtype) of a query block's sums, and of what the heads of a tile share."""
    of_queries = lambda *rows: ((*rows, sizes.queries), jnp.float32)
    kept = dict(
        peak=of_queries(sizes.heads, 1),
        total=of_queries(sizes.heads, 1),
        oT=of_queries(sizes.heads, sizes.rows),
        shared=of_queries(sizes.keys),
    )
    if sizes.average:
        kept |= dict(aT=of_queries(sizes.model), p_sum=of_queries(sizes.keys))
    return kept


def _resident(program: Program, sizes: Sizes) -> None:
    inputs, outputs, i = program.inputs, program.outputs, pl.program_id(1)
    refs = tiles.merged(program)
    if sizes.diagonal == "shared":
        refs = refs._replace(gT=inputs.g)
    _lay_out(inputs, refs, i, sizes)
    _start(refs)
    tiles.for_each_tile(lambda tile: _attend_to(tile, refs), i, sizes)
    _finish(outputs, refs, sizes)
    if sizes.average:
        tiles.for_each_tile(lambda tile: _average(tile, refs), i, sizes)
        outputs.a[...] = refs.aT[...]


def _lay_out(inputs: Refs, refs: Refs, i, sizes: Sizes) -> None:
    start = i * sizes.queries
    tiles.lay_out_heads(inputs.q, sizes, rows=(refs.qT, 0))
    if sizes.values:
        tiles.lay_out_heads(inputs.k, sizes, columns=(refs.k, start))
        tiles.lay_out_heads(inputs.v, sizes, rows=(refs.vT, start))
    else:
        both = dict(columns=(refs.k, start), rows=(refs.vT, start))
        tiles.lay_out_heads(inputs.k, sizes, **both)
    tiles.lay_out_diagonal(inputs, refs, start, sizes)
    tiles.lay_out_segments(refs, start, sizes)


def _streamed_arrays(sizes: Sizes):
    values = "vT" if sizes.values else "kT"
    return (*_operands(sizes), values, *layout.scores(sizes)), _outputs(sizes)


def _streamed(program: Program, sizes: Sizes) -> None:
    outputs = program.outputs
    x, sweep, step = (pl.program_id(axis) for axis in (1, 2, 3))
    i = layout.Row(x, program.tables, sizes).place
    last = step == sizes.key_blocks - 1
    refs = tiles.merged(program)
    if not sizes.values:
        refs = refs._replace(vT=refs.kT)
    see = lambda visit: tiles.at_tile(
        lambda tile: visit(tile, refs), i, sizes.key_block(step), sizes
    )

    def give():
        outputs.a[...] = refs.aT[...]

    pl.when((sweep == 0) & (step == 0))(lambda: _start(refs))
    pl.when(sweep == 0)(lambda: see(_attend_to))
    pl.when((sweep == 0) & last)(lambda: _finish(outputs, refs, sizes))
    if sizes.average:
        pl.when(sweep == 1)(lambda: see(_average))
        pl.when((sweep == 1) & last)(give)


# Steps of both kernels for a query block and its tiles.


def _start(refs: Refs) -> None:
    """Reset the maxima and sums of a query block."""
    refs.peak[...] = jnp.full_like(refs.peak, -jnp.inf)
    tiles.clear(refs.total, refs.oT, refs.aT)


def _attend_to(tile: Tile, refs: Refs):
    sizes = tile.sizes
    strips = tile.strips()
    tiles.share_scores(strips, refs)

    def visit(head):
        found = [(strip.lanes, _attend_strip(strip, refs, head)) for strip in strips]

        def write():
            for lanes, values in found:
                for ref, x in values:
                    ref[head, :, lanes] = x

        return write

    tiles.for_each_head(visit, sizes, HEADS_TOGETHER)


def _attend_strip(strip: Tile, refs: Refs, head) -> tuple:
    """Return the head's maxima, totals and averages, updated with this strip's keys."""
    sizes, lanes = strip.sizes, strip.lanes
    s_NI = strip.scores(refs, head)
    old_1I = refs.peak[head, :, lanes]
    new_1I = jnp.maximum(old_1I, s_NI.max(0, keepdims=True))
    p_NI = jnp.exp2(s_NI - new_1I)
    keep_1I = jnp.exp2(old_1I - new_1I)
    fresh_SI = tiles.product(refs.vT[head, :, strip.keys], p_NI.astype(sizes.dtype), (1, 0), sizes)
    return (
        (refs.peak, new_1I),
        (refs.total, refs.total[head, :, lanes] * keep_1I + p_NI.sum(0, keepdims=True)),
        (refs.oT, refs.oT[head, :, lanes] * keep_1I + fresh_SI),
    )


def _finish(outputs: Refs, refs: Refs, sizes: Sizes):
    """Write lse and o, after all tiles."""
    for head in range(sizes.heads):
        total_1I = refs.total[head]
        lse_1I = refs.peak[head] * tiles.LN2 + jnp.log(total_1I)
        bias_1I = tiles.query_bias(refs, head, sizes)
        if bias_1I is not None:
            lse_1I = lse_1I - bias_1I
        outputs.lse[head : head + 1, :] = lse_1I
        o_RI = refs.oT[head, : sizes.width] / total_1I
        outputs.o[tiles.head_slice(head, sizes.width), :] = o_RI


def _average(tile: Tile, refs: Refs):
    """Add hᵀ A of one tile to aᵀ, once the softmax of every head is known."""
    sizes = tile.sizes
    strips = tile.strips()
    tiles.share_scores(strips, refs)
    refs.p_sum[...] = jnp.zeros_like(refs.p_sum)

    def visit(head):
        for strip in strips:
            lanes = strip.lanes
            log2_sum_1I = refs.peak[head, :, lanes] + jnp.log2(refs.total[head, :, lanes])
            p_NI = jnp.exp2(strip.scores(refs, head) - log2_sum_1I)
            refs.p_sum[strip.rows, lanes] += p_NI

    tiles.for_each_head(visit, sizes, HEADS_TOGETHER)
    for strip in strips:
        shares_NI = refs.p_sum[strip.rows, strip.lanes].astype(sizes.dtype)
        hT_DN = refs.hT[:, strip.keys]
        refs.aT[:, strip.lanes] += tiles.product(hT_DN, shares_NI, (1, 0), sizes)


RESIDENT = Kernel(
    name="tpu_forward",
    body=_resident,
    arrays=lambda sizes: (layout.given(sizes), _outputs(sizes)),
    operand=layout.flat,
    scratch=lambda sizes: _sums(sizes) | layout.resident((*_operands(sizes), "vT"), sizes),
    streamed=False,
    blocks=((512, 512), (512, 256)),  # smaller ones are slower than streaming: docs/kernels-tpu.md
    heads_together=HEADS_TOGETHER,
)
STREAMED = Kernel(
    name="tpu_streamed_forward",
    body=_streamed,
    arrays=_streamed_arrays,
    operand=layout.laid_out,
    scratch=_sums,
    streamed=True,
    blocks=((512, 512), (512, 256), (256, 256), (256, 128), (128, 128)),
    heads_together=HEADS_TOGETHER,
)

"""The backward kernels of attention on a TPU.

Both do the same work per tile, for all heads, in one sweep for all gradients; separate sweeps for
dk and dq would compute every score twice. The resident kernel has all keys in VMEM: one program per
batch element and query block, in order of position. The streamed kernel has one key block: one
program per batch element, query block, sweep and key block, from the diagonal back to the first;
its operands are already laid out. Legend: `tiles`; layouts: `layout`. Per tile and head,
with S̄ the sum of dS over the heads if they share g:

    p = exp(s − lse)        dS = p (v·doᵀ + E − Δ)      E = h·eᵀ, e the gradient of a
    dqᵀ += kᵀ dS            dkᵀ += qᵀ dSᵀ + doᵀ pᵀ      (dvᵀ += doᵀ pᵀ with separate values)
    dgᵀ += hᵀ S̄             dhᵀ += gᵀ S̄ᵀ + eᵀ Aᵀ        A = Σ_k p

In the resident kernel dk and dh stay in VMEM over the query blocks of a batch element and are
written once; in the streamed one they are summed in HBM (`sums`). Either way the order of summation
is fixed. Δ = do·o − dlse + Σ_j p E; the last term takes an earlier sweep, the rest is an input.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cem_jax.kernels.tpu import layout, tiles
from cem_jax.kernels.tpu.layout import Kernel, Program, Sizes
from cem_jax.kernels.tpu.sums import SLOTS, Sums
from cem_jax.kernels.tpu.tiles import Refs, Tile

HEADS_TOGETHER = 2


def _resident_arrays(sizes: Sizes):
    cotangents = ("do", *(("da",) if sizes.average else ()))
    return (*layout.given(sizes), "lse", "delta", *cotangents), layout.gradients(sizes)


def _operands(sizes: Sizes) -> tuple[str, ...]:
    """Return the names of the laid-out arrays that tiles read."""
    has = dict(v=sizes.values, gT=sizes.model, h=sizes.model, hT=sizes.model, eT=sizes.average)
    has |= dict(segment_columns=sizes.scores.segments)
    return ("qT", "doT", "k", "kT", *(name for name, present in has.items() if present))


def _resident_scratch(sizes: Sizes) -> dict:
    summed = {f"{name}T": (shape, jnp.float32) for name, shape in _summed(sizes).items()}
    return _sums(sizes) | layout.resident(_operands(sizes), sizes) | summed


def _sums(sizes: Sizes) -> dict:
    """Return (shape, dtype) of a query block's sums, and of what the heads of a tile share."""
    of_queries = lambda *rows: ((*rows, sizes.queries), jnp.float32)
    tile = of_queries(sizes.keys)
    kept = dict(
        minus_lse=of_queries(sizes.heads, 1),
        delta=of_queries(sizes.heads, 1),
        dqT=of_queries(sizes.heads, sizes.rows),
        shared=tile,
    )
    if sizes.diagonal == "shared":
        kept |= dict(dgT=of_queries(sizes.model), ds_sum=tile)
    elif sizes.diagonal == "per_head":
        kept |= dict(dgT=of_queries(sizes.heads, sizes.model))
    if sizes.average:
        kept |= dict(p_sum=tile, cross=tile)
    return kept


def _summed(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the laid-out shapes of the keys' gradients, to which all queries add."""
    operands = {name: layout.laid_out(name, sizes) for name in layout.gradients(sizes)}
    return {name: x.shape for name, x in operands.items() if x.part == "hbm"}


def _resident(program: Program, sizes: Sizes) -> None:
    inputs, outputs, i = program.inputs, program.outputs, pl.program_id(1)
    refs = tiles.merged(program)
    if sizes.diagonal == "shared":
        refs = refs._replace(gT=inputs.g)
    sums = (refs.dkT, refs.dvT, refs.dhT, *refs.dscores)
    pl.when(i == 0)(lambda: tiles.clear(*sums))
    _lay_out(inputs, refs, i, sizes)
    _start_queries(inputs, refs, sizes)
    if sizes.average:
        tiles.for_each_tile(lambda tile: _complete_delta(tile, refs), i, sizes)
    tiles.for_each_tile(lambda tile: _visit(tile, refs), i, sizes)
    _finish_queries(outputs, refs, sizes)
    pl.when(i == pl.num_programs(1) - 1)(lambda: _finish_keys(outputs, refs, sizes))


def _lay_out(inputs: Refs, refs: Refs, i, sizes: Sizes) -> None:
    start = i * sizes.queries
    tiles.lay_out_heads(inputs.q, sizes, rows=(refs.qT, 0))
    tiles.lay_out_heads(inputs.k, sizes, columns=(refs.k, start), rows=(refs.kT, start))
    if sizes.values:
        tiles.lay_out_heads(inputs.v, sizes, columns=(refs.v, start))
    tiles.lay_out_diagonal(inputs, refs, start, sizes)
    if sizes.average:
        refs.eT[...] = inputs.da[...]
    tiles.lay_out_segments(refs, start, sizes)
    tiles.lay_out_heads(inputs.do, sizes, rows=(refs.doT, 0))


def _streamed_arrays(sizes: Sizes):
    inputs = (*_operands(sizes), "lse", "delta", *layout.scores(sizes))
    return inputs, layout.gradients(sizes)


def _streamed_scratch(sizes: Sizes) -> dict:
    kept = _sums(sizes)
    for name, (*rows, _) in _summed(sizes).items():
        kept[f"{name}T"] = ((SLOTS, *rows, sizes.keys), jnp.float32)
    return kept


def _streamed(program: Program, sizes: Sizes) -> None:
    inputs, outputs = program.inputs, program.outputs
    b, x, sweep, step = (pl.program_id(axis) for axis in range(4))
    row = layout.Row(x, program.tables, sizes)
    i, j = row.place, sizes.key_block(step)
    refs = tiles.merged(program)
    hbm = {name: getattr(outputs, name).at[b] for name in _summed(sizes)}
    slots = {name: getattr(refs, f"{name}T") for name in hbm}
    sums = Sums(hbm, slots, program.copied, row, j, sizes)
    refs = refs._replace(**{f"{name}T": slot for name, slot in sums.own.items()})
    see = lambda visit: tiles.at_tile(lambda tile: visit(tile, refs), i, j, sizes)

    first = (sweep == 0) & (step == 0)
    pl.when(first & (x == 0))(lambda: tiles.clear(*refs.dscores))
    pl.when(first)(lambda: _start_queries(inputs, refs, sizes))
    if sizes.average:
        pl.when(sweep == 0)(lambda: see(_complete_delta))
    last_sweep = sweep == sizes.sweeps - 1

    def add():
        sums.begin()
        see(_visit)
        sums.end()

    pl.when(last_sweep & (j <= sizes.last_key_block(i)))(add)
    finish = lambda: _finish_queries(outputs, refs, sizes)
    pl.when(last_sweep & (j == 0))(finish)


# Steps of both kernels for a query block and its tiles.


def _start_queries(inputs: Refs, refs: Refs, sizes: Sizes):
    """Prepare a query block: set its per-row numbers and clear its sums."""
    tiles.clear(refs.dqT, refs.dgT)
    for head in range(sizes.heads):
        row = slice(head, head + 1)
        refs.delta[head] = inputs.delta[row, :]
        lse_1I = inputs.lse[row, :]
        bias_1I = tiles.query_bias(refs, head, sizes)
        if bias_1I is not None:
            lse_1I = lse_1I + bias_1I
        refs.minus_lse[head] = lse_1I * -tiles.LOG2E


def _probabilities(strip: Tile, refs: Refs, head):
    return jnp.exp2(strip.scores(refs, head) + refs.minus_lse[head, :, strip.lanes])


def _share_cross(strips: list, refs: Refs):
    """Write E_ij = e_i·h_j of each strip."""
    for strip in strips:
        eT_DI = refs.eT[:, strip.lanes]
        cross_NI = tiles.product(refs.h[strip.keys], eT_DI, (1, 0), strip.sizes)
        refs.cross[strip.rows, strip.lanes] = cross_NI


def _complete_delta(tile: Tile, refs: Refs):
    """Add Σ_j p E over one tile to Δ."""
    strips = tile.strips()
    tiles.share_scores(strips, refs)
    _share_cross(strips, refs)

    def add(head):
        for strip in strips:
            p_NI = _probabilities(strip, refs, head)
            mean_1I = (p_NI * refs.cross[strip.rows, strip.lanes]).sum(0, keepdims=True)
            refs.delta[head, :, strip.lanes] += mean_1I

    tiles.for_each_head(add, tile.sizes, HEADS_TOGETHER)


def _visit(tile: Tile, refs: Refs):
    """Add one tile's part to every gradient."""
    sizes = tile.sizes
    strips = tile.strips()
    tiles.share_scores(strips, refs)
    if sizes.average:
        _share_cross(strips, refs)
    tiles.clear(refs.ds_sum, refs.p_sum)

    def add(head):
        for strip in strips:
            _visit_strip(strip, refs, head)

    tiles.for_each_head(add, sizes, HEADS_TOGETHER)
    # one tiles.product each for a whole tile; on the diagonal, strips see different keys
    for part in [tile] if tile.behind is None else strips:
        _add_shared_gradients(part, refs)


def _visit_strip(strip: Tile, refs: Refs, head):
    sizes, lanes = strip.sizes, strip.lanes
    p_NI = _probabilities(strip, refs, head)
    values_NS = (refs.v if sizes.values else refs.k)[head, strip.keys]
    dp_NI = tiles.product(values_NS, refs.doT[head, :, lanes], (1, 0), sizes)
    if sizes.average:
        dp_NI = dp_NI + refs.cross[strip.rows, lanes]
        refs.p_sum[strip.rows, lanes] += p_NI
    ds_NI = p_NI * (dp_NI - refs.delta[head, :, lanes])
    strip.add_bias_gradients(refs, head, ds_NI)
    if sizes.diagonal == "shared":
        refs.ds_sum[strip.rows, lanes] += ds_NI
    scaled_NI = (ds_NI * sizes.c).astype(sizes.dtype)
    _add_head_gradients(strip, refs, head, scaled_NI, p_NI.astype(sizes.dtype))


def _add_head_gradients(strip: Tile, refs: Refs, head, ds_NI, p_NI):
    sizes, lanes, keys = strip.sizes, strip.lanes, strip.keys
    refs.dqT[head, :, lanes] += tiles.product(refs.kT[head, :, keys], ds_NI, (1, 0), sizes)
    if sizes.diagonal == "per_head":
        refs.dgT[head, :, lanes] += tiles.product(refs.hT[:, keys], ds_NI, (1, 0), sizes)
        refs.dhT[:, keys] += tiles.product(refs.gT[head, :, lanes], ds_NI, (1, 1), sizes)
    qT_SI, doT_SI = (ref[head, :, lanes] for ref in (refs.qT, refs.doT))
    if sizes.values:
        refs.dkT[head, :, keys] += tiles.product(qT_SI, ds_NI, (1, 1), sizes)
        refs.dvT[head, :, keys] += tiles.product(doT_SI, p_NI, (1, 1), sizes)
        return
    # one tiles.product over both, so that the sum is read and written only once
    both_S2I = jnp.concatenate([qT_SI, doT_SI], axis=1)
    both_N2I = jnp.concatenate([ds_NI, p_NI], axis=1)
    refs.dkT[head, :, keys] += tiles.product(both_S2I, both_N2I, (1, 1), sizes)


def _add_shared_gradients(part: Tile, refs: Refs):
    """Add the gradients from sums over heads: dg and dh from S̄, and dh from A."""
    sizes, lanes, keys = part.sizes, part.lanes, part.keys
    if sizes.diagonal == "shared":
        ds_NI = (refs.ds_sum[part.rows, lanes] * sizes.c).astype(sizes.dtype)
        refs.dgT[:, lanes] += tiles.product(refs.hT[:, keys], ds_NI, (1, 0), sizes)
        refs.dhT[:, keys] += tiles.product(refs.gT[:, lanes], ds_NI, (1, 1), sizes)
    if sizes.average:
        p_NI = refs.p_sum[part.rows, lanes].astype(sizes.dtype)
        refs.dhT[:, keys] += tiles.product(refs.eT[:, lanes], p_NI, (1, 1), sizes)


def _finish_queries(outputs: Refs, refs: Refs, sizes: Sizes):
    for head in range(sizes.heads):
        dq_RI = refs.dqT[head, : sizes.width]
        outputs.dq[tiles.head_slice(head, sizes.width), :] = dq_RI.astype(sizes.dtype)
        if sizes.diagonal == "per_head":
            dg_DI = refs.dgT[head].astype(sizes.dtype)
            outputs.dg[tiles.head_slice(head, sizes.model), :] = dg_DI
    if sizes.diagonal == "shared":
        outputs.dg[...] = refs.dgT[...].astype(sizes.dtype)


def _finish_keys(outputs: Refs, refs: Refs, sizes: Sizes):
    """Write the keys' gradients block by block, so that the code is as short as for one."""

    def write(n, _):
        block = tiles.span(n * sizes.queries, sizes.queries)
        for output, kept in ((outputs.dk, refs.dkT), (outputs.dv, refs.dvT)):
            for head in range(0 if kept is None else sizes.heads):
                d_RN = kept[head, : sizes.width, block]
                output[tiles.head_slice(head, sizes.width), block] = d_RN.astype(sizes.dtype)
        if sizes.diagonal != "none":
            outputs.dh[:, block] = refs.dhT[:, block].astype(sizes.dtype)
        return 0

    lax.fori_loop(0, sizes.positions // sizes.queries, write, 0)


RESIDENT = Kernel(
    name="tpu_backward",
    body=_resident,
    arrays=_resident_arrays,
    operand=layout.flat,
    scratch=_resident_scratch,
    streamed=False,
    blocks=((512, 512), (512, 256), (256, 256)),  # smaller ones are slower than streaming
    heads_together=HEADS_TOGETHER,
)
STREAMED = Kernel(
    name="tpu_streamed_backward",
    body=_streamed,
    arrays=_streamed_arrays,
    operand=layout.laid_out,
    scratch=_streamed_scratch,
    streamed=True,
    blocks=((512, 512), (512, 256), (256, 256), (256, 128), (128, 128)),
    heads_together=HEADS_TOGETHER,
)

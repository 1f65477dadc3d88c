"""Attention, its keys as values, on a TPU: the streamed forward kernel, a block of keys at a time.

What `tpu_forward` does, and to each tile by its functions. One program a batch element, block of
queries, sweep and block of keys, from the diagonal back to the first; all heads inside. Everything
comes laid out (`tpu_layout`), so VMEM holds blocks and a block of queries' sums, whatever J is.
"""

from jax.experimental import pallas as pl

from cem_jax.kernels.tpu.forward import attend_to, average, finish, start, sums
from cem_jax.kernels.tpu.layout import laid_out
from cem_jax.kernels.tpu.plan import Sizes
from cem_jax.kernels.tpu.rows import Row
from cem_jax.kernels.tpu.tiles import at_tile

STREAMED = True
BLOCKS = ((512, 512), (512, 256), (256, 256), (256, 128), (128, 128))
operand = laid_out
scratch = sums


def arrays(sizes: Sizes):
    """Names of what comes in and goes out."""
    has = dict(gT=sizes.model, h=sizes.model, hT=sizes.exact, slopes=sizes.slopes)
    has |= dict(self_bias=sizes.self_bias, segments=sizes.segments)
    has |= dict(segment_columns=sizes.segments)
    values = "vT" if sizes.values else "kT"
    inputs = ("qT", "k", values, *(name for name, present in has.items() if present))
    return inputs, ("lse", "o", *(("a",) if sizes.exact else ()))


def kernel(*references, sizes: Sizes):
    *tables, inputs, outputs, kept = references
    x, sweep, step = (pl.program_id(axis) for axis in (1, 2, 3))
    i = Row(x, tables, sizes).place
    last = step == sizes.key_blocks - 1
    refs = {"vT": inputs["vT" if sizes.values else "kT"]} | inputs | kept
    pl.when((sweep == 0) & (step == 0))(lambda: start(refs))
    see = lambda visit: at_tile(lambda tile: visit(tile, refs), i, sizes.key_block(step), sizes)
    pl.when(sweep == 0)(lambda: see(attend_to))
    pl.when((sweep == 0) & last)(lambda: finish(outputs, refs, sizes))
    if sizes.exact:
        pl.when(sweep == 1)(lambda: see(average))
        pl.when((sweep == 1) & last)(lambda: _give(outputs, refs))


def _give(outputs: dict, refs: dict):
    outputs["a"][...] = refs["aT"][...]

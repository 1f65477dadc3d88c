"""Attention, its keys as values, on a TPU: the streamed backward kernel, a block of keys at a time.

What `tpu_backward` does, in one sweep too, and to each tile by its functions. One program a batch
element, block of queries, sweep and block of keys, from the diagonal back to the first; all heads
inside. Everything comes laid out (`tpu_layout`).

dq and dg of a block of queries are added up in VMEM. dk, dv and dh of a block of keys are added up
in HBM, in float32, by the programs of a batch element one after the other, so in one order: `Sums`.
Scores are computed once for all gradients, where a sweep for dk and one for dq would do it twice.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cem_jax.kernels.tpu import backward
from cem_jax.kernels.tpu.layout import gradients, laid_out
from cem_jax.kernels.tpu.plan import Sizes
from cem_jax.kernels.tpu.rows import Row
from cem_jax.kernels.tpu.tiles import at_tile, span

STREAMED = True
BLOCKS = ((512, 512), (512, 256), (256, 256), (256, 128), (128, 128))
SLOTS = 3  # of a sum in VMEM: one is read ahead, one is added to, one is written back
READ, WRITE = 0, 1
operand = laid_out


def arrays(sizes: Sizes):
    """Names of what comes in and goes out."""
    has = dict(v=sizes.values, gT=sizes.model, h=sizes.model, hT=sizes.model, eT=sizes.exact)
    has |= dict(slopes=sizes.slopes, self_bias=sizes.self_bias, segments=sizes.segments)
    has |= dict(segment_columns=sizes.segments)
    present = (name for name, there in has.items() if there)
    return ("qT", "doT", "lse", "delta", "k", "kT", *present), gradients(sizes)


def summed(sizes: Sizes) -> tuple[str, ...]:
    """Names of the gradients that are added up in HBM."""
    return tuple(name for name in gradients(sizes) if operand(name, sizes).part == "hbm")


def scratch(sizes: Sizes) -> dict:
    """(shape, dtype) of what the kernel keeps."""
    kept = backward.sums(sizes)
    for name in summed(sizes):
        *rows, _ = operand(name, sizes).shape
        kept[f"{name}T"] = ((SLOTS, *rows, sizes.keys), jnp.float32)
    return kept


def kernel(*references, sizes: Sizes):
    *tables, inputs, outputs, kept = references
    b, x, sweep, step = (pl.program_id(axis) for axis in range(4))
    row = Row(x, tables, sizes)
    i, j = row.place, sizes.key_block(step)
    sums = Sums({name: outputs[name].at[b] for name in summed(sizes)}, kept, row, j, sizes)
    refs = inputs | kept | sums.refs
    refs |= {name: outputs[name] for name in ("dslopes", "dself_bias") if name in outputs}
    see = lambda visit: at_tile(lambda tile: visit(tile, refs), i, j, sizes)

    first = (sweep == 0) & (step == 0)
    pl.when(first & (x == 0))(lambda: backward.clear(refs, "dslopes", "dself_bias"))
    pl.when(first)(lambda: backward.start_queries(inputs, refs, sizes))
    if sizes.exact:
        pl.when(sweep == 0)(lambda: see(backward.complete_delta))
    last_sweep = sweep == sizes.sweeps - 1

    def add():
        sums.begin()
        see(backward.visit)
        sums.end()

    pl.when(last_sweep & (j <= sizes.last_key_block(i)))(add)
    finish = lambda: backward.finish_queries(outputs, refs, sizes)
    pl.when(last_sweep & (j == 0))(finish)


class Sums:
    """dk, dv and dh of the block of keys `j`, from HBM and back, while the queries of `row` add.

    Tile t of a batch element adds in slot t mod 3; meanwhile what tile t − 1 added is written, and
    the block of tile t + 1 is read, unless t + 1 is the first to see that block.
    A read must not meet the last write to its block, by the row before. Blocks of keys come from
    the diagonal back, so a block comes again n tiles later to a row of n tiles, and is read a tile
    before that, when of writes only that of tile t − 1 is under way. So the one danger is in n = 2,
    in the second row of a sequence with ratio = 1: tile 1 reads what tile 0 writes, which therefore
    waits.
    """

    def __init__(self, hbm: dict, kept: dict, row: Row, j, sizes: Sizes):
        self.hbm, self.sizes, self.row, self.j = hbm, sizes, row, j
        self.tile = row.tiles + sizes.last_key_block(row.place) - j
        self.slots = {name: kept[f"{name}T"] for name in hbm}
        self.copied = {name: kept[f"{name}_copied"] for name in hbm}
        self.refs = {f"{name}T": self._slot(name) for name in hbm}

    def begin(self):
        """This tile's block is there, and the next one's on its way."""
        seen = self.j < self.row.seen
        clear = lambda: backward.clear(self.refs, *self.refs)
        wait = lambda: self._each(lambda name: self._read(name, self.j, 0).wait())
        fetch = lambda: self._each(lambda name: self._read(name, self.j - 1, 1).start())
        pl.when(jnp.logical_not(seen))(clear)
        pl.when(seen)(wait)
        pl.when((self.j >= 1) & (self.j - 1 < self.row.seen))(fetch)

    def end(self):
        """This tile's block is on its way back; after the last tile it has arrived."""
        wait = lambda: self._each(lambda name: self._write(name).wait())
        at_once = 1 if self.sizes.ratio == 1 else 0  # tiles that wait for their own write
        pl.when(self.tile > at_once)(wait)  # for that of the tile before
        self._each(lambda name: self._write(name).start())
        last = (self.row.x == self.sizes.query_blocks - 1) & (self.j == 0)
        pl.when(last | (self.tile < at_once))(wait)

    def _each(self, act):
        for name in self.hbm:
            act(name)

    def _read(self, name: str, j, ahead: int):
        copied = self.copied[name].at[READ]
        return pltpu.make_async_copy(self._block(name, j), self._slot(name, ahead), copied)

    def _write(self, name: str):
        copied = self.copied[name].at[WRITE]
        return pltpu.make_async_copy(self._slot(name), self._block(name, self.j), copied)

    def _slot(self, name: str, ahead: int = 0):
        return self.slots[name].at[lax.rem(self.tile + ahead, SLOTS)]

    def _block(self, name: str, j):
        rows = (slice(None),) * (len(self.hbm[name].shape) - 1)
        return self.hbm[name].at[(*rows, span(j * self.sizes.keys, self.sizes.keys))]

"""Sums of gradients in HBM, for the streamed TPU kernel: dk, dv and dh, in float32.

A key block is visited once per query block. The programs of a batch element add to its sums one
after the other, so the order is fixed, while the copies overlap with the products.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cem_jax.kernels.tpu import tiles
from cem_jax.kernels.tpu.layout import Row, Sizes

SLOTS = 3  # per sum in VMEM: one is prefetched, one is added to, one is written back
READ, WRITE = 0, 1


class Sums:
    """The sums dk, dv and dh of key block `j`, copied from and to HBM as the queries of `row` add.

    Tile t of a batch element adds in slot t mod 3. Meanwhile the sum of tile t − 1 is written, and
    the block of tile t + 1 is read, unless t + 1 is the first to see that block.
    A read must not overlap the last write to its block, by the previous row. Key blocks are visited
    from the diagonal back, so a block recurs n tiles later in a row of n tiles, and is read one
    tile before that, when only the write of tile t − 1 is in flight. So the only hazard is n = 2,
    in the second row of a sequence with ratio = 1: tile 1 reads what tile 0 writes, which therefore
    waits.
    """

    def __init__(self, hbm: dict, slots: dict, copied: dict, row: Row, j, sizes: Sizes):
        """Take dicts keyed by gradient name; `copied` holds semaphores."""
        self.hbm, self.slots, self.copied = hbm, slots, copied
        self.row, self.j, self.sizes = row, j, sizes
        self.tile = row.tiles + sizes.last_key_block(row.place) - j
        self.own = {name: self._slot(name) for name in hbm}  # where this tile adds

    def begin(self) -> None:
        """Wait for this tile's block and start reading the next one."""
        seen = self.j < self.row.seen
        clear = lambda: tiles.clear(*self.own.values())
        wait = lambda: self._each(lambda name: self._read(name, self.j, 0).wait())
        fetch = lambda: self._each(lambda name: self._read(name, self.j - 1, 1).start())
        pl.when(jnp.logical_not(seen))(clear)
        pl.when(seen)(wait)
        pl.when((self.j >= 1) & (self.j - 1 < self.row.seen))(fetch)

    def end(self) -> None:
        """Start writing this tile's block back; after the last tile, wait for the write."""
        wait = lambda: self._each(lambda name: self._write(name).wait())
        at_once = 1 if self.sizes.ratio == 1 else 0  # tiles that wait for their own write
        pl.when(self.tile > at_once)(wait)  # for the previous tile's write
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
        return self.hbm[name].at[(*rows, tiles.span(j * self.sizes.keys, self.sizes.keys))]

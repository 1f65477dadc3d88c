"""Which blocks of queries a streamed TPU kernel works for, and in which order.

Where positions are split over devices, a device's queries are two chunks of the sequence, and which
ones only the device knows. So where each block stands comes to the kernel in tables, in SMEM. Of a
whole sequence it is known: reading it took 1 % more static cycles. All else is one kernel for both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cem_jax.kernels.chunks import Chunks
from cem_jax.kernels.tpu.plan import Sizes


class Tables(NamedTuple):
    """Numbers of the rows of tiles, a block of queries each, in the order of the sequence. [X].

    So of the keys that a row sees, those that rows before it have seen are the first.
    """

    block: jax.Array  # where its queries lie in their arrays, in blocks
    place: jax.Array  # where they stand in the sequence, in blocks
    seen: jax.Array  # blocks of keys that rows before it have seen
    tiles: jax.Array  # of all rows before it


class Row:
    """Numbers of row `x`, read when they are asked for.

    `tables`: the ones there are, or none for a whole sequence.
    """

    def __init__(self, x, tables: Sequence[Tables], sizes: Sizes):
        self.x, self.tables, self.sizes = x, tables, sizes

    def _read(self, name: str, of_whole):
        return getattr(self.tables[0], name)[self.x] if self.tables else of_whole

    @property
    def block(self):
        return self._read("block", self.x)

    @property
    def place(self):
        return self._read("place", self.x)

    @property
    def seen(self):
        return self._read("seen", self.x * self.sizes.ratio)

    @property
    def tiles(self):
        return self._read("tiles", self.sizes.ratio * self.x * (self.x + 1) // 2)


def tables_of(chunks: Chunks, sizes: Sizes) -> Tables:
    tables = (_columns(starts // sizes.queries, sizes) for starts in chunks.blocks(sizes.queries))
    return Tables(*(jnp.asarray(chunks.own(column)) for column in zip(*tables, strict=True)))


def _columns(places: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, ...]:
    """`places`: of the blocks as they lie in the arrays."""
    block = np.argsort(places).astype(np.int32)
    place = places[block]
    seen = np.concatenate([[0], sizes.last_key_block(place[:-1]) + 1]).astype(np.int32)
    return block, place, seen, np.cumsum(seen, dtype=np.int32)

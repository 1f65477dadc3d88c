"""Which queries one call works for, where the positions of a sequence are split over devices.

Of 2n chunks of the sequence device r of n works for two, r and 2n−1−r: a causal row costs as many
tiles as there are keys before it, so every device then has the same number of them.
"""

from typing import Any, NamedTuple

import numpy as np
from jax import lax


class Chunks(NamedTuple):
    """Those of all devices, and which device is at work; keys are those of the whole sequence."""

    starts: tuple[tuple[int, int], ...]  # first positions of a device's chunks, as its arrays lie
    length: int  # positions of a chunk
    device: Any  # traced

    def own(self, tables):
        """The table of the device at work, out of one for each."""
        return lax.dynamic_index_in_dim(np.stack(tables), self.device, keepdims=False)

    def blocks(self, size: int) -> list[np.ndarray]:
        """First positions of the blocks of `size` queries, of each device."""
        cut = lambda start: np.arange(start, start + self.length, size, dtype=np.int32)
        return [np.concatenate([*map(cut, starts)]) for starts in self.starts]

    @property
    def end(self):
        """The first position that no query of the device at work sees."""
        return self.own([np.int32(max(starts) + self.length) for starts in self.starts])


def balanced(devices: int, length: int, device) -> Chunks:
    """The even chunk first: it is the one that comes out of the first halves of devices' arrays."""
    pair = lambda r: sorted((r, 2 * devices - 1 - r), key=lambda chunk: chunk % 2)
    starts = tuple(tuple(chunk * length for chunk in pair(r)) for r in range(devices))
    return Chunks(starts, length, device)

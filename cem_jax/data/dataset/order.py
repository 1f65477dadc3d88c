"""The order of training windows: the n-th of a run is a pure function of (seed, n).

n counts windows through the whole run. `choose` assigns it to a source, as that source's window i;
with W windows in the source, it is at place i % W of the permutation of epoch i // W. Epochs follow
each other without a gap, so no window is dropped between them.

grain has a shuffle and a mixture too. They are written here because whole blocks of numbers go
through them in a few NumPy calls (grain's take some microseconds of Python per window, several
times as long as the gather), because each source keeps exact shares and epochs of its own, and
because resuming depends on the order: it must not change with a library's version.

N window numbers
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt64

_BLOCK = 8192  # numbers drawn at once
_ROUNDS = 6
_U = np.uint64


@dataclass(frozen=True)
class WindowOrder:
    """The order in which training draws windows."""

    seed: int
    sizes: tuple[int, ...]  # windows of each source
    shares: tuple[int, ...]  # of each source in the windows drawn, in any unit

    def windows(
        self, number_N: Int64[np.ndarray, " N"]
    ) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """Return (source, window within the source's stream) for each number.

        The numbers should be close together: all between the smallest and the largest are drawn.
        """
        first = int(number_N.min()) // _BLOCK
        last = int(number_N.max()) // _BLOCK
        blocks = [_drawn_block(self, block) for block in range(first, last + 1)]
        source_M, window_M = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        place_N = number_N - first * _BLOCK
        return source_M[place_N], window_M[place_N]


@functools.lru_cache(maxsize=8)
def _drawn_block(order: WindowOrder, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw `_BLOCK` consecutive numbers at once and cache them for the next batches."""
    number_N = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
    source_N, within_N = choose(order.shares, number_N)
    size_N = np.asarray(order.sizes, np.int64)[source_N]
    epoch_N, place_N = np.divmod(within_N, size_N)
    key_N = hashed(order.seed, source_N, epoch_N)
    window_N = np.empty_like(place_N)
    for source, size in enumerate(order.sizes):
        own_N = source_N == source
        window_N[own_N] = permuted(place_N[own_N], size, key_N[own_N])
    return source_N, window_N


def choose(
    shares: Sequence[int], number_N: Int64[np.ndarray, " N"]
) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
    """Return the source of each window number n >= 0, and its number within the source.

    Shares are exact and evenly spread: among the first n windows each is met to within the number
    of sources, and every source's numbers run 0, 1, 2, … without gaps.
    """
    within_N = number_N.astype(np.int64)
    source_N = np.full_like(within_N, len(shares) - 1)
    open_N = np.ones(within_N.shape, bool)
    left = sum(shares)
    for source, share in enumerate(shares[:-1]):
        before_N = within_N * share // left
        taken_N = open_N & ((within_N + 1) * share // left > before_N)
        source_N[taken_N] = source
        # Windows not taken are renumbered among themselves for the sources that follow.
        open_N &= ~taken_N
        within_N = np.where(taken_N, before_N, np.where(open_N, within_N - before_N, within_N))
        left -= share
    return source_N, within_N


def drawn(shares: Sequence[int], windows: int) -> tuple[int, ...]:
    """Count how many of the first `windows` windows come from each source."""
    counts = []
    left = sum(shares)
    for share in shares:
        counts.append(windows * share // left)
        windows -= counts[-1]
        left -= share
    return tuple(counts)


def hashed(*values: Int64[np.ndarray, " N"] | int) -> UInt64[np.ndarray, " N"]:
    """Mix every tuple of integers into one 64-bit number; at least one argument is an array."""
    state = np.zeros(np.broadcast_shapes(*(np.shape(v) for v in values)), _U)
    for value in values:
        state = _mixed(state ^ np.asarray(value).astype(np.int64).astype(_U))
    return state


def permuted(
    index_N: Int64[np.ndarray, " N"], size: int, key_N: UInt64[np.ndarray, " N"]
) -> Int64[np.ndarray, " N"]:
    """Apply the key's random permutation of [0, size) to each index, without state.

    A Feistel network permutes the smallest range of 4^b numbers that holds `size`; numbers
    beyond `size` are permuted again until they fall into it (less than four times on average).
    """
    half = _U(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = (_U(1) << half) - _U(1)
    out = index_N.astype(_U)
    outside = np.ones(out.shape, bool)
    while outside.any():
        out[outside] = _feistel(out[outside], key_N[outside], half, mask)
        outside = out >= _U(size)
    return out.astype(np.int64)


def _feistel(
    value_N: UInt64[np.ndarray, " N"],
    key_N: UInt64[np.ndarray, " N"],
    half: np.uint64,
    mask: np.uint64,
) -> UInt64[np.ndarray, " N"]:
    left_N, right_N = value_N >> half, value_N & mask
    for round_number in range(_ROUNDS):
        scrambled_N = _mixed(key_N ^ (right_N + (_U(round_number) << _U(56)))) & mask
        left_N, right_N = right_N, left_N ^ scrambled_N
    return (left_N << half) | right_N


def _mixed(state_N: UInt64[np.ndarray, " N"]) -> UInt64[np.ndarray, " N"]:
    """Scramble 64 bits invertibly: add, then twice xor-shift and multiply."""
    state_N = np.asarray(state_N + _U(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state_N ^= state_N >> _U(shift)
        state_N *= _U(factor)
    state_N ^= state_N >> _U(31)
    return state_N

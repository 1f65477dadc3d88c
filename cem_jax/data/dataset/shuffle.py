"""A random permutation of [0, size) that is computed pointwise: no state, no memory."""

import numpy as np
from jaxtyping import Int64, UInt64

_ROUNDS = 6
_U = np.uint64


def hashed(*values: Int64[np.ndarray, " N"] | int) -> UInt64[np.ndarray, " N"]:
    """One well-mixed 64-bit number for every tuple of integers; at least one is an array."""
    state = np.zeros(np.broadcast_shapes(*(np.shape(v) for v in values)), _U)
    for value in values:
        state = _mixed(state ^ np.asarray(value).astype(np.int64).astype(_U))
    return state


def permuted(
    index_N: Int64[np.ndarray, " N"], size: int, key_N: UInt64[np.ndarray, " N"]
) -> Int64[np.ndarray, " N"]:
    """Where the key's permutation of [0, size) takes each index; indices lie in [0, size).

    A Feistel network permutes the smallest range of 4^b numbers that holds `size`; numbers
    beyond `size` are sent on until they come back into it (less than four rounds on average).
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
    """An invertible scramble of 64 bits: add, then twice xor-shift and multiply."""
    state_N = np.asarray(state_N + _U(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state_N ^= state_N >> _U(shift)
        state_N *= _U(factor)
    state_N ^= state_N >> _U(31)
    return state_N

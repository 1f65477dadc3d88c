"""Positions: ALiBi's slopes and rotary coordinates.

Shapes: B leading axes · J positions · K heads · R head dim.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

SLOPE_SCHEMES = ("power_of_two", "press")


class Rotary(NamedTuple):
    """Rotary coordinates: `positions` [J] or [..., J] in tokens, and the base of the angles."""

    positions: Int[Array, "*B J"]
    base: float = 10_000.0


def alibi_slopes(num_heads: int, scheme: str = "power_of_two") -> Float[np.ndarray, " K"]:
    """Return the slopes m_k of the logits −m_k (i − j), one per head, in float32.

    power_of_two (Appendix B): m_k = 2^−k, k = 1..K. press (Press et al. 2022): m_k = 2^(−8k/K);
    if K is not a power of two, the slopes for the next lower power of two, then every other slope
    for the next higher one. Raises ValueError for an unknown scheme or no heads.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1; got {num_heads}")
    if scheme == "power_of_two":
        return np.exp2(-np.arange(1, num_heads + 1, dtype=np.float64)).astype(np.float32)
    if scheme == "press":
        lower = 2 ** math.floor(math.log2(num_heads))
        slopes = [*_geometric(lower), *_geometric(2 * lower)[0::2]]
        return np.array(slopes[:num_heads], np.float32)
    raise ValueError(f"scheme must be one of {', '.join(SLOPE_SCHEMES)}; got {scheme!r}")


def _geometric(count: int) -> list[float]:
    return [2.0 ** (-8.0 * k / count) for k in range(1, count + 1)]


def rotate(
    x_BJKR: Float[Array, "*B J K R"], rotary: Rotary | None, *, inverse: bool = False
) -> Float[Array, "*B J K R"]:
    """Return rot(i) x_i, in the dtype of `x`: (r, r + R/2) rotate by i · base^(−2r/R).

    `inverse` rotates back: rot(i)ᵀ. Raises ValueError if R is odd or the positions do not match.
    """
    if rotary is None:
        return x_BJKR
    width = x_BJKR.shape[-1]
    if width % 2:
        raise ValueError(f"rotary coordinates need an even head dimension; got {width}")
    dtype = jnp.promote_types(x_BJKR.dtype, jnp.float32)
    frequencies = jnp.asarray(rotary.base, dtype) ** (-jnp.arange(0, width, 2, dtype=dtype) / width)
    positions = jnp.asarray(rotary.positions).astype(dtype)
    expected = x_BJKR.shape[:-2]
    if positions.ndim == 0 or positions.shape != expected[len(expected) - positions.ndim :]:
        raise ValueError(f"rotary positions must be [J] or {expected}; got {positions.shape}")
    angles = positions[..., None, None] * frequencies.reshape((1,) * (positions.ndim + 1) + (-1,))
    angles = jnp.expand_dims(angles, range(x_BJKR.ndim - angles.ndim))
    cos, sin = jnp.cos(angles), jnp.sin(-angles if inverse else angles)
    first, second = jnp.split(x_BJKR.astype(dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BJKR.dtype)

"""The interaction energy of Eq. 2, 12 and Appendix B, in NumPy and float64.

Shapes: J positions (i query, j key) · D model dim · K heads · R head dim.
"""

import numpy as np
from attention_oracle import attention


def rotation(position: float, width: int, base: float) -> np.ndarray:
    """Return rot(i), [R, R]: coordinates (r, r + R/2) turn by i · base^(−2r/R)."""
    matrix, half = np.eye(width), width // 2
    for r in range(half):
        angle = position * base ** (-2 * r / width)
        matrix[r, r] = matrix[r + half, r + half] = np.cos(angle)
        matrix[r, r + half], matrix[r + half, r] = -np.sin(angle), np.sin(angle)
    return matrix


def interaction(u, h, query, key, *, tau, diagonal=None, rotary=None, **scores):
    """Return ε(u_i | h_1:i), [J], from scores and sums in loops."""
    q, k = np.einsum("krd,jd->jkr", query, u), np.einsum("krd,jd->jkr", key, h)
    if rotary is not None:
        positions, base = rotary
        turns = np.stack([rotation(position, q.shape[-1], base) for position in positions])
        q, k = (np.einsum("jrs,jks->jkr", turns, x) for x in (q, k))
    if diagonal is not None:
        scores |= dict(g=u * diagonal if diagonal.ndim == 1 else u[:, None] * diagonal, h=h)
    return -tau * attention(q, k, tau=tau, **scores)[0].sum(0)


def random_layer(rng, *, positions=5, dim=6, heads=2, width=4, leading=(), diagonal="none") -> dict:
    """Return random arguments of `interaction_energy`, including slopes and a self bias."""
    draw = lambda *shape: rng.normal(size=shape)
    layer = dict(
        u=draw(*leading, positions, dim),
        h=draw(*leading, positions, dim),
        query=0.5 * draw(heads, width, dim),
        key=0.5 * draw(heads, width, dim),
        slopes=rng.uniform(0.05, 0.5, heads),
        self_bias=draw(heads),
    )
    if diagonal != "none":
        layer["diagonal"] = 0.5 * draw(*([heads] if diagonal == "per_head" else []), dim)
    return layer


def gradient(function, x, step=1e-5):
    """Return the gradient of a scalar function of an array, by central differences."""
    result = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        ahead, behind = x.copy(), x.copy()
        ahead[index] += step
        behind[index] -= step
        result[index] = (function(ahead) - function(behind)) / (2 * step)
    return result

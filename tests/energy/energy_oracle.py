"""The energies of Eq. 2, 7, 12 and Appendix B in loops, in NumPy and float64.

Shapes: J positions (i query, j key) · D model dim · K heads · R head dim · M MLP dim.
"""

import numpy as np


def rotation(position: float, width: int, base: float) -> np.ndarray:
    """rot(i), [R, R]: coordinates (r, r + R/2) turn by i · base^(−2r/R)."""
    matrix, half = np.eye(width), width // 2
    for r in range(half):
        angle = position * base ** (-2 * r / width)
        matrix[r, r] = matrix[r + half, r + half] = np.cos(angle)
        matrix[r, r + half], matrix[r + half, r] = -np.sin(angle), np.sin(angle)
    return matrix


def interaction(
    u, h, query, key, *, tau, diagonal=None, slopes=None, self_bias=None, rotary=None, segments=None
):
    """ε(u_i | h_1:i), [J], from A_ijk = diag(d_k) + W^Q_kᵀ rot(i)ᵀ rot(j) W^K_k written out."""
    heads, width, _ = query.shape
    energy = np.zeros(len(u))
    for i in range(len(u)):
        for k in range(heads):
            scores = []
            for j in range(i + 1):
                if segments is not None and segments[i] != segments[j]:
                    continue
                turn = np.eye(width)
                if rotary is not None:
                    at = lambda p: rotation(rotary[0][p], width, rotary[1])
                    turn = at(i).T @ at(j)
                matrix = query[k].T @ turn @ key[k]
                if diagonal is not None:
                    matrix = matrix + np.diag(diagonal if diagonal.ndim == 1 else diagonal[k])
                bias = 0.0 if slopes is None else -slopes[k] * (i - j)
                if self_bias is not None and i == j:
                    bias += self_bias[k]
                scores.append((matrix @ h[j]) @ u[i] / tau + bias)
            energy[i] -= tau * np.logaddexp.reduce(scores)
    return energy


def random_layer(rng, *, positions=5, dim=6, heads=2, width=4, leading=(), diagonal="none") -> dict:
    """Arrays of `interaction_energy`; slopes and self bias included."""
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
    """Central differences of a scalar function of an array."""
    result = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        ahead, behind = x.copy(), x.copy()
        ahead[index] += step
        behind[index] -= step
        result[index] = (function(ahead) - function(behind)) / (2 * step)
    return result

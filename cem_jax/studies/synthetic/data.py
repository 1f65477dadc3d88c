"""Functions drawn from Gaussian processes, by random Fourier features.

    f(x) = √(2/S) Σ_s w_s cos(ω_s·g(x) + b_s)     w_s ~ N(0, 1), b_s ~ U[0, 2π), ω_s ~ spectrum

has mean 0 and, over draws of w, b and ω, exactly the covariance k(x, x') of the kernel from whose
spectrum the ω_s are drawn (Rahimi and Recht, 2007); it is Gaussian up to terms of order 1/S.
An exact draw, by Cholesky, costs N³/3 operations and 8N² bytes for N points: 5 GB at the 25,000
points used here. Features cost N S, and the same function can be evaluated at any number of
further points, so the size of the training set is a free choice.

Every kernel has unit variance and is a stationary kernel of the warped inputs g(x).

Shapes: N points · D inputs · W warped inputs · S features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

INPUTS = 10
LENGTH_SCALE = 3.0  # ℓ, for all kernels; the inputs are uniform on [−1, 1]^10
PERIOD = 5.0  # of the periodic kernel; the inputs span two fifths of a period
_FEATURES = 4096
_ROWS = 2048  # points at a time

Array = np.ndarray


@dataclass(frozen=True)
class Kernel:
    """A kernel k(x, x') = correlation(‖g(x) − g(x')‖² / ℓ²)."""

    title: str
    formula: str  # r² is the squared distance of the warped inputs in length scales
    correlation: Callable[[Array], Array]  # of r²
    scales: Callable[[np.random.Generator, int], Array]  # [S]: ω = scale · N(0, I) / ℓ
    warp: Callable[[Array], Array] = lambda x: x
    length_scale: float = LENGTH_SCALE

    def covariance(self, x: Float[Array, "N D"], y: Float[Array, "N D"]) -> Float[Array, " N"]:
        """Return k(x_n, y_n), row by row."""
        apart = (self.warp(x) - self.warp(y)) / self.length_scale
        return self.correlation(np.square(apart).sum(-1))

    def draw(self, rng: np.random.Generator, features: int = _FEATURES):
        """Return a random function from [N, D] inputs to [N] values, both float64."""
        width = self.warp(np.zeros((1, INPUTS))).shape[-1]
        omega_WS = rng.standard_normal((width, features)) / self.length_scale
        omega_WS *= self.scales(rng, features)
        phase_S = rng.uniform(0, 2 * np.pi, features)
        weight_S = rng.standard_normal(features) * np.sqrt(2 / features)

        def function(x_ND):
            parts = np.split(x_ND, range(_ROWS, len(x_ND), _ROWS))
            return np.concatenate(
                [np.cos(self.warp(part) @ omega_WS + phase_S) @ weight_S for part in parts]
            )

        return function


def _rbf(title: str, formula: str, warp=lambda x: x) -> Kernel:
    """Return the kernel exp(−r²/2); its spectrum is Gaussian."""
    return Kernel(title, formula, lambda r2: np.exp(-r2 / 2), lambda rng, n: np.ones(n), warp)


def _matern() -> Kernel:
    """Return the kernel with ν = 3/2; its spectrum is Student's t with 2ν degrees of freedom."""
    correlation = lambda r2: (1 + np.sqrt(3 * r2)) * np.exp(-np.sqrt(3 * r2))
    scales = lambda rng, n: np.sqrt(3 / rng.chisquare(3, n))
    return Kernel("Matérn", "(1 + √3 r) exp(−√3 r)", correlation, scales)


def _rational_quadratic() -> Kernel:
    """Return the kernel with α = 1/2: RBF kernels over a Gamma distribution of precisions."""
    scales = lambda rng, n: np.sqrt(rng.gamma(0.5, 2.0, n))
    return Kernel("Rational quadratic", "1 / √(1 + r²)", lambda r2: 1 / np.sqrt(1 + r2), scales)


def _on_circles(x_ND):
    """Map each input to its own circle: r² = 4 Σ_d sin²(π(x_d − x'_d)/p) / ℓ²."""
    angle_ND = 2 * np.pi * x_ND / PERIOD
    return np.concatenate([np.cos(angle_ND), np.sin(angle_ND)], axis=-1)


def _stretched(x_ND):
    """Warp each input to a length scale of ℓ/(1 + x_d): ℓ/2 at x_d = 1, growing towards −1."""
    return x_ND + np.square(x_ND) / 2


KERNELS = {
    "rbf": _rbf("RBF", "exp(−r²/2)"),
    "matern": _matern(),
    "periodic": _rbf("Periodic", f"exp(−2 Σ sin²(π(x − x')/{PERIOD:g})/ℓ²)", _on_circles),
    "rational_quadratic": _rational_quadratic(),
    "non_stationary": _rbf("Non-stationary", "exp(−r²/2) of x + x²/2", _stretched),
}


class Data(NamedTuple):
    """The training and test points of one function, float32."""

    x: Float[Array, "N D"]
    y: Float[Array, " N"]
    test_x: Float[Array, "N D"]
    test_y: Float[Array, " N"]


def describe(kernel: str) -> dict[str, Any]:
    """Return the choices made here that the paper leaves open."""
    k = KERNELS[kernel]
    return {"covariance": k.formula, "length_scale": k.length_scale, "features": _FEATURES}


def make_data(kernel: str, seed: int, points: int, test_points: int) -> Data:
    """Return the points of one random function; equal arguments give equal points."""
    rng = np.random.default_rng([seed, list(KERNELS).index(kernel)])
    function = KERNELS[kernel].draw(rng)
    x = rng.uniform(-1, 1, (points + test_points, INPUTS))
    x, y = x.astype(np.float32), function(x).astype(np.float32)
    return Data(x[:points], y[:points], x[points:], y[points:])

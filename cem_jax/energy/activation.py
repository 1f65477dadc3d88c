"""Activations: σ and its antiderivative φ, with φ' = σ and φ(−∞) = 0.

The element-wise energy contains φ; its gradient needs only σ. Each φ therefore has σ as its
derivative by definition, which keeps the gradient as exact and as cheap as σ.

To add an activation, add an entry to the table here and a name in `config.schema`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import erf
from jax.scipy.stats import norm
from jaxtyping import Array, Float, Shaped

Function = Callable[[Float[Array, "*N"]], Float[Array, "*N"]]


class Activation(NamedTuple):
    """An activation σ, its antiderivative φ, and their numerical properties."""

    name: str
    sigma: Function
    phi: Function  # has `sigma` as its derivative, by definition
    slope: float  # max |σ'|, rounded up
    smooth: bool = True  # False: σ' jumps at 0
    phi_error: float = 0.0  # error of φ in float64, beyond rounding


def gelu(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Return x Φ(x), computed with the error function."""
    return 0.5 * x * (1.0 + erf(x / jnp.sqrt(jnp.asarray(2.0, x.dtype))))


# Bernoulli's series of the integral of log(1 + e^−a) in w = log(1 + e^−a), to w⁹.
_SERIES = ((2, 1 / 4), (3, 1 / 36), (5, -1 / 3600), (7, 1 / 211680), (9, -1 / 10886400))


def _silu_antiderivative(x):
    """Return ∫ z/(1 + e^−z) dz = x²/2 − π²/6 + ψ(|x|) for x ≥ 0, −ψ(|x|) for x < 0.

    ψ(a) = a·w − Li₂(−e^−a), with Li₂ from its series in w. The error is at most 4e-11 in float64.
    """
    a = jnp.minimum(jnp.abs(x), 1e3)  # beyond 745, e^−a and a·w are 0; for a = ∞, a·w would be ∞·0
    w = jnp.log1p(jnp.exp(-a))
    psi = a * w + w + sum(c * w**n for n, c in _SERIES)
    return jnp.where(x >= 0, 0.5 * x * x - jnp.pi**2 / 6 + psi, -psi)


def _gelu_antiderivative(x):
    """Return ½[(x² − 1)Φ(x) + x·Φ'(x)]."""
    x = jnp.maximum(x, -40.0)  # φ(−40) is 0; for x far below, x²Φ(x) would be ∞·0
    cumulative = 0.5 * jax.lax.erfc(-x / jnp.sqrt(jnp.asarray(2.0, x.dtype)))
    return 0.5 * ((x * x - 1.0) * cumulative + x * norm.pdf(x))


def _relu_antiderivative(x):
    return 0.5 * jnp.square(jax.nn.relu(x))


def _with_derivative(phi: Function, sigma: Function) -> Function:
    """Return `phi` with `sigma` as its derivative."""
    function = jax.custom_jvp(phi)
    function.defjvp(lambda primals, tangents: (function(*primals), sigma(*primals) * tangents[0]))
    return function


def _entry(name: str, sigma: Function, phi: Function, slope: float, **known) -> Activation:
    return Activation(name, sigma, _with_derivative(phi, sigma), slope, **known)


ACTIVATIONS: dict[str, Activation] = {
    entry.name: entry
    for entry in (
        _entry("silu", jax.nn.silu, _silu_antiderivative, 1.09984, phi_error=4e-11),
        _entry("gelu", gelu, _gelu_antiderivative, 1.12891),
        _entry("relu", jax.nn.relu, _relu_antiderivative, 1.0, smooth=False),
    )
}


def activation(name: str) -> Activation:
    """Return the activation called `name`. Raises ValueError if there is none."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {name!r}")
    return ACTIVATIONS[name]


def antiderivative(name: str) -> Callable[[Shaped[Array, "*N"]], Float[Array, "*N"]]:
    """Return φ of the activation called `name`. Raises ValueError if there is none.

    φ computes in float32 or better and returns the dtype of its argument.
    """
    phi = activation(name).phi

    def function(x: Shaped[Array, "*N"]) -> Float[Array, "*N"]:
        x = jnp.asarray(x)
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(float)
        return phi(x.astype(jnp.promote_types(dtype, jnp.float32))).astype(dtype)

    return function

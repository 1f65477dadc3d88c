"""Activations: σ and its antiderivative φ, with φ' = σ and φ(−∞) = 0.

The element-wise energy is written with φ; its gradient needs σ alone. Each φ therefore carries σ as
its derivative by definition, which keeps the gradient as exact as σ and as cheap.

A new activation is one entry of the table here and one name in `config.schema`.
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
    """An activation, and what is known of it."""

    name: str
    sigma: Function
    phi: Function  # its derivative is `sigma`, by definition
    slope: float  # max |σ'|, rounded up
    smooth: bool = True  # False: σ' jumps at 0
    phi_error: float = 0.0  # how far φ is off its integral in float64, beyond rounding


def gelu(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Return x Φ(x), with the error function."""
    return 0.5 * x * (1.0 + erf(x / jnp.sqrt(jnp.asarray(2.0, x.dtype))))


# Bernoulli's series of the integral of log(1 + e^−a) in w = log(1 + e^−a), to w⁹.
_SERIES = ((2, 1 / 4), (3, 1 / 36), (5, -1 / 3600), (7, 1 / 211680), (9, -1 / 10886400))


def _silu_antiderivative(x):
    """∫ z/(1 + e^−z) dz = x²/2 − π²/6 + ψ(|x|) for x ≥ 0, −ψ(|x|) below.

    ψ(a) = a·w − Li₂(−e^−a), Li₂ by its series in w. Off by at most 4e-11 in float64.
    """
    a = jnp.minimum(jnp.abs(x), 1e3)  # from 745 on e^−a is 0, and a·w too, not ∞·0
    w = jnp.log1p(jnp.exp(-a))
    psi = a * w + w + sum(c * w**n for n, c in _SERIES)
    return jnp.where(x >= 0, 0.5 * x * x - jnp.pi**2 / 6 + psi, -psi)


def _gelu_antiderivative(x):
    """½[(x² − 1)Φ(x) + x·Φ'(x)]."""
    x = jnp.maximum(x, -40.0)  # φ(−40) is 0; far below, x²Φ(x) would be ∞·0
    cumulative = 0.5 * jax.lax.erfc(-x / jnp.sqrt(jnp.asarray(2.0, x.dtype)))
    return 0.5 * ((x * x - 1.0) * cumulative + x * norm.pdf(x))


def _relu_antiderivative(x):
    return 0.5 * jnp.square(jax.nn.relu(x))


def _with_derivative(phi: Function, sigma: Function) -> Function:
    """`phi`, differentiated as `sigma`."""
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
    """Return the activation of that name. Raises ValueError on an unknown name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {name!r}")
    return ACTIVATIONS[name]


def antiderivative(name: str) -> Callable[[Shaped[Array, "*N"]], Float[Array, "*N"]]:
    """Return φ of that name, computed in float32 or better, in the dtype of its argument.

    Raises ValueError on an unknown name.
    """
    phi = activation(name).phi

    def function(x: Shaped[Array, "*N"]) -> Float[Array, "*N"]:
        x = jnp.asarray(x)
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(float)
        return phi(x.astype(jnp.promote_types(dtype, jnp.float32))).astype(dtype)

    return function

"""Pairs (σ, φ): an activation and its antiderivative, φ' = σ and φ(−∞) = 0.

The element-wise energy is written with φ; its gradient needs σ alone. Each φ therefore carries σ as
its derivative by definition, which keeps the gradient as exact as σ and as cheap.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.special import erf
from jax.scipy.stats import norm

Function = Callable[[jax.Array], jax.Array]


def gelu(x):
    """x Φ(x), with the error function."""
    return 0.5 * x * (1.0 + erf(x / jnp.sqrt(jnp.asarray(2.0, x.dtype))))


ACTIVATIONS: dict[str, Function] = {"silu": jax.nn.silu, "gelu": gelu, "relu": jax.nn.relu}

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


_ANTIDERIVATIVES = {
    "silu": _with_derivative(_silu_antiderivative, jax.nn.silu),
    "gelu": _with_derivative(_gelu_antiderivative, gelu),
    "relu": _with_derivative(_relu_antiderivative, jax.nn.relu),
}


def activation(name: str) -> Function:
    """σ by name: silu, gelu or relu. Raises ValueError on another."""
    return _lookup(ACTIVATIONS, name)


def antiderivative(name: str) -> Function:
    """φ by name, with φ' = σ and φ(−∞) = 0, computed in float32 or better, in the dtype of `x`.

    Raises ValueError on an unknown name.
    """
    phi = _lookup(_ANTIDERIVATIVES, name)

    def function(x):
        x = _floating(x)
        return phi(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)

    return function


def _floating(x) -> jax.Array:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


def _lookup(table: dict[str, Function], name: str) -> Function:
    if name not in table:
        raise ValueError(f"activation must be one of {', '.join(table)}; got {name!r}")
    return table[name]

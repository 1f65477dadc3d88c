import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr

from cem_jax.energy import antiderivative
from cem_jax.energy.activation import ACTIVATIONS, activation

POINTS = np.array([-40.0, -20.0, -8.0, -3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 8.0, 20.0, 40.0])


def silu(z):
    return z / (1 + np.exp(-z)) if z >= 0 else z * np.exp(z) / (1 + np.exp(z))


NUMPY = {"silu": silu, "gelu": lambda z: z * ndtr(z), "relu": lambda z: max(z, 0.0)}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_antiderivative_is_the_integral(x64, name):
    """Integrate from −60: the integral of SiLU up to there is 6e-25."""
    sigma = NUMPY[name]
    expected, total, low = [], 0.0, -60.0
    for x in POINTS:
        total += quad(sigma, low, x, epsabs=1e-13, epsrel=1e-13)[0]
        low = x
        expected.append(total)
    phi = antiderivative(name)(POINTS)
    assert phi.dtype == jnp.float64
    np.testing.assert_allclose(phi, expected, rtol=1e-13, atol=5e-11)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_are_the_activation(x64, name):
    phi, x = antiderivative(name), np.linspace(-30, 30, 200)  # without 0, the corner of ReLU
    sigma = activation(name).sigma(jnp.asarray(x))
    np.testing.assert_allclose(sigma, [NUMPY[name](z) for z in x], rtol=1e-12, atol=1e-15)
    by_ad = jax.grad(lambda x: phi(x).sum())(x)
    np.testing.assert_allclose(by_ad, sigma, rtol=1e-15)
    step = 1e-4
    by_differences = (phi(x + step) - phi(x - step)) / (2 * step)
    np.testing.assert_allclose(by_differences, sigma, rtol=1e-6, atol=1e-6)
    slope = jax.grad(lambda x: jax.grad(lambda x: phi(x).sum())(x).sum())(x)
    by_differences = (activation(name).sigma(x + step) - activation(name).sigma(x - step)) / (
        2 * step
    )
    np.testing.assert_allclose(slope, by_differences, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_vanishes_far_below(name, dtype):
    x = jnp.array([-50.0, -300.0, -2e4, -jnp.inf], dtype)
    phi = antiderivative(name)(x)
    assert phi.dtype == x.dtype
    np.testing.assert_allclose(phi.astype(jnp.float32), 0.0, atol=1e-15)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_precision(x64, name):
    """float32 is good to 1.7e-7 (1 + |φ|); lower precisions equal float32 rounded once."""
    for dtype, tolerance in (("float32", 1.7e-7), ("bfloat16", 2.0**-8), ("float16", 2.0**-10)):
        x = jnp.asarray(np.linspace(-40, 40, 20_001), dtype)
        phi = np.asarray(antiderivative(name)(x), np.float64)
        exact = np.asarray(antiderivative(name)(x.astype(jnp.float64)))
        assert (np.abs(phi - exact) / (1 + np.abs(exact))).max() <= tolerance, dtype


def test_array_likes_and_unknown_names():
    np.testing.assert_allclose(antiderivative("relu")([-1, 2, 3]), [0.0, 2.0, 4.5])
    for lookup in (activation, antiderivative):
        with pytest.raises(ValueError, match="silu, gelu, relu; got 'tanh'"):
            lookup("tanh")

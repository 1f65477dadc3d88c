"""Draws from Gaussian processes: their covariance is the kernel's."""

import numpy as np
import pytest

from cem_jax.studies.synthetic.data import KERNELS, LENGTH_SCALE, PERIOD, make_data

ORIGIN = np.zeros((1, 10))
AT = np.linspace(-1, 1, 10)[None]


@pytest.mark.parametrize("name", KERNELS)
def test_draws_have_the_kernels_covariance(name):
    """3,000 functions at a few points: products average to k within 4 standard errors."""
    kernel, rng, draws = KERNELS[name], np.random.default_rng(0), 3000
    x_ND = rng.uniform(-1, 1, (4, 10))
    values = np.stack([kernel.draw(rng, features=64)(x_ND) for _ in range(draws)])
    for m, n in np.ndindex(4, 4):
        products = values[:, m] * values[:, n]
        expected = kernel.covariance(x_ND[m : m + 1], x_ND[n : n + 1])[0]
        assert abs(products.mean() - expected) < 4 * products.std() / np.sqrt(draws)
    assert np.abs(values.mean(0)).max() < 4 / np.sqrt(draws)


def covariance(name, x, y):
    return float(KERNELS[name].covariance(x, y)[0])


@pytest.mark.parametrize("name", KERNELS)
def test_unit_variance(name):
    assert covariance(name, AT, AT) == pytest.approx(1)


def test_known_covariances():
    """Compare at a distance of one length scale along the first input."""
    unit = np.zeros((1, 10))
    unit[0, 0] = LENGTH_SCALE
    assert covariance("rbf", ORIGIN, unit) == pytest.approx(np.exp(-0.5))
    root = np.sqrt(3)
    assert covariance("matern", ORIGIN, unit) == pytest.approx((1 + root) * np.exp(-root))
    assert covariance("rational_quadratic", ORIGIN, unit) == pytest.approx(np.sqrt(0.5))


def test_periodic():
    step = np.zeros((1, 10))
    step[0, 3] = PERIOD
    assert covariance("periodic", AT, AT + step) == pytest.approx(1)
    half = covariance("periodic", ORIGIN, step / 2)
    assert half == pytest.approx(np.exp(-2 / LENGTH_SCALE**2))


def test_only_one_kernel_depends_on_the_place():
    shift = np.full((1, 10), 0.5)
    moved = {n: covariance(n, ORIGIN, AT) - covariance(n, shift, AT + shift) for n in KERNELS}
    assert abs(moved.pop("non_stationary")) > 0.01
    np.testing.assert_allclose(list(moved.values()), 0, atol=1e-12)


def test_data():
    data = make_data("rbf", 1, points=30, test_points=20)
    assert data.x.shape == (30, 10) and data.test_y.shape == (20,)
    assert np.abs(np.concatenate([data.x, data.test_x])).max() <= 1
    again, other = make_data("rbf", 1, 30, 20), make_data("rbf", 2, 30, 20)
    np.testing.assert_array_equal(data.y, again.y)
    assert not np.allclose(data.y, other.y)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.sharding.linear import project, readout


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
def test_readout_is_the_plain_product_to_second_order(x64, leading):
    rng = np.random.default_rng(0)
    y, weight = rng.normal(size=(*leading, 5)), rng.normal(size=(5, 4))
    bar, directions = rng.normal(size=(*leading, 4)), (rng.normal(size=y.shape), weight**2)
    plain = lambda y, w: jnp.einsum("...f,fd->...d", y, w)

    def derivatives(f):
        loss = lambda y, w: (bar * jnp.sin(f(y, w))).sum()
        first = jax.grad(loss, argnums=(0, 1))
        along = lambda y, w: sum(jnp.vdot(*p) for p in zip(directions, first(y, w), strict=True))
        return f(y, weight), first(y, weight), jax.grad(along, argnums=(0, 1))(y, weight)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12),
        derivatives(readout),
        derivatives(plain),
    )


def test_readout_is_the_transpose_of_project(x64):
    rng = np.random.default_rng(1)
    x, y, weight = rng.normal(size=(3, 4)), rng.normal(size=(3, 5)), rng.normal(size=(5, 4))
    np.testing.assert_allclose(jnp.vdot(y, project(x, weight)), jnp.vdot(readout(y, weight), x))
    np.testing.assert_allclose(project(x, weight), x @ weight.T, rtol=1e-12)


def test_dtype_is_that_of_what_is_projected():
    weight = jnp.ones((5, 4), jnp.float32)
    for f, width in ((project, 4), (readout, 5)):
        x = jnp.ones((2, 3, width), jnp.bfloat16)
        assert f(x, weight).dtype == jnp.bfloat16
        x_bar, weight_bar = jax.grad(
            lambda x, w, f=f: f(x, w).astype(jnp.float32).sum(), argnums=(0, 1)
        )(x, weight)
        assert (x_bar.dtype, weight_bar.dtype) == (jnp.bfloat16, jnp.float32)


def test_weight_gradient_in_bfloat16_is_rounded_once():
    """A sum of 512 terms, kept in float32 to the end: half a unit in the last place."""
    rng = np.random.default_rng(2)
    y, bar = (jnp.asarray(rng.normal(size=(2, 256, n)), jnp.bfloat16) for n in (8, 6))
    weight = jnp.zeros((8, 6), jnp.bfloat16)
    gradient = jax.vjp(lambda w: readout(y, w), weight)[1](bar)[0].astype(jnp.float32)
    exact = np.einsum("btf,btd->fd", np.asarray(y, np.float64), np.asarray(bar, np.float64))
    np.testing.assert_allclose(gradient, exact, rtol=2.0**-8, atol=1e-5)

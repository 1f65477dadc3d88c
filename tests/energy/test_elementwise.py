import jax
import jax.numpy as jnp
import numpy as np
import pytest
from energy_oracle import gradient
from jax.test_util import check_grads

from cem_jax.energy import antiderivative, elementwise_energy, elementwise_force
from cem_jax.energy.elementwise import hidden_force


def layer(rng, leading=(), positions=3, dim=4, width=5):
    draw = lambda *shape: rng.normal(size=shape)
    return draw(*leading, positions, dim), draw(*leading, positions, width), draw(width, dim)


@pytest.mark.parametrize(
    ("activation", "leading"), [("silu", ()), ("silu", (2, 1)), ("gelu", (2,)), ("relu", (1,))]
)
def test_energy_and_force(x64, activation, leading):
    rng = np.random.default_rng(0)
    u, gamma, tied = layer(rng, leading)
    phi = antiderivative(activation)
    expected = np.zeros(u.shape[:-1])
    for at in np.ndindex(expected.shape):
        expected[at] = -sum(g * phi(tied[m] @ u[at]) for m, g in enumerate(gamma[at]))
    energy = elementwise_energy(u, gamma, tied, activation=activation)
    np.testing.assert_allclose(energy, expected, rtol=1e-12, atol=1e-13)
    total = lambda u: elementwise_energy(u, gamma, tied, activation=activation).sum()
    force = elementwise_force(u, gamma, tied, activation=activation)
    np.testing.assert_allclose(force, -jax.grad(total)(u), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(force, -gradient(jax.jit(total), u), rtol=1e-6, atol=1e-6)
    p = rng.normal(size=(4, 4))  # not symmetric: tells P from its transpose
    np.testing.assert_allclose(
        elementwise_force(u, gamma, tied, activation=activation, preconditioner=p),
        np.einsum("de,...e->...d", p, force),
        rtol=1e-11,
    )


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_autodiff_equals_the_closed_form_in_training(x64, activation):
    rng = np.random.default_rng(1)
    (u, gamma, tied), bar = layer(rng, (2,)), rng.normal(size=(2, 3, 5))

    def derivatives(update):
        force = lambda u, gamma, tied: hidden_force(
            jnp.einsum("md,...d->...m", tied, u), gamma, activation=activation, update=update
        )
        loss = lambda *t: (bar * force(*t)).sum()
        return force(u, gamma, tied), jax.grad(loss, argnums=(0, 1, 2))(u, gamma, tied)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14),
        derivatives("autodiff"),
        derivatives("closed_form"),
    )
    force = lambda *t: elementwise_force(*t, activation=activation)
    check_grads(force, (u, gamma, tied), order=1, modes=["rev"])


def test_dtypes():
    layers = [jnp.asarray(x, jnp.bfloat16) for x in layer(np.random.default_rng(2))]
    wide = [x.astype(jnp.float32) for x in layers]
    energy, force = elementwise_energy(*layers), elementwise_force(*layers)
    assert (energy.dtype, force.dtype) == (jnp.float32, jnp.bfloat16)
    # z is rounded to bfloat16, by half a unit of 2⁻⁸, and then summed over five features
    np.testing.assert_allclose(energy, elementwise_energy(*wide), atol=0.2)
    np.testing.assert_allclose(force.astype(jnp.float32), elementwise_force(*wide), atol=0.2)
    for update in ("autodiff", "closed_form"):
        z = hidden_force(layers[1], layers[1], activation="silu", update=update)
        assert z.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "sizes",
    [
        ((3, 4), (3, 1), (5, 4)),
        ((3, 4), (5,), (5, 4)),
        ((3, 4), (3, 5), (4, 5)),
        ((2, 3, 4), (3, 5), (5, 4)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(sizes):
    for function in (elementwise_energy, elementwise_force):
        with pytest.raises(ValueError, match=r"gamma|tied"):
            function(*(np.zeros(s, np.float32) for s in sizes))

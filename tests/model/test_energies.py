"""Layers descend their energies: `update` is the gradient of `energy`."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from model_configs import full_config, random_parameters

from cem_jax.energy import preconditioner_matrix
from cem_jax.model import CEMMLP, CEMAttention
from cem_jax.model.parameters import with_values

KINDS = {"attention": CEMAttention, "mlp": CEMMLP}
ONE_P = dict(preconditioner_heads="shared", diagonal_in_update=True)


def sublayer(config, name, dtype=np.float64):
    parameters = oracle.layer_of(random_parameters(config, dtype), 0)[name]
    return with_values(lambda: KINDS[name](config, rngs=nnx.Rngs(0)), parameters)


def matrix(layer):
    """Return the matrix P, one for all heads."""
    return preconditioner_matrix(*layer.preconditioner.factors())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "fields",
    [
        dict(step_norm="none"),
        dict(norm_gradient="full"),
        dict(norm_gradient="full", step_norm="separate", diagonal="per_head", position="rope"),
        dict(norm_gradient="full", step_norm="weightless", update="closed_form"),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_update_is_minus_the_gradient_of_energy(name, fields):
    config = full_config(
        **ONE_P, **fields, preconditioner="none", mlp_preconditioner="none", step_size=0.5
    )
    layer = sublayer(config, name)
    x, h = np.random.default_rng(0).normal(size=(2, 2, 5, config.dim))
    # h_i is held, so position i's energy depends only on x_i
    with jax.disable_jit():
        gradient = jax.grad(lambda x: layer.energy(x, h).sum())(jnp.asarray(x))
        update = layer.update(x=jnp.asarray(x), context=jnp.asarray(h))
    eta = 0.5 if name == "attention" else 1.0
    np.testing.assert_allclose(update, -eta * gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", KINDS)
def test_one_preconditioner_for_all_heads_multiplies_the_gradient(name):
    layer = sublayer(full_config(**ONE_P, step_norm="none"), name)
    x, h = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 5, 8)))
    with jax.disable_jit():
        gradient = jax.grad(lambda x: layer.energy(x, h).sum())(x)
        update = layer.update(x, h)
    np.testing.assert_allclose(update, -gradient @ matrix(layer), rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_documents_do_not_see_each_other():
    layer = sublayer(full_config(), "attention")
    x, h = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 5, 8)))
    with jax.disable_jit():
        packed = layer.energy(x, h, segments=jnp.array([[4, 4, 1, 1, 1]]))
        alone = layer.energy(x[:, 2:], h[:, 2:])
    assert packed.shape == (1, 5)
    np.testing.assert_allclose(packed[:, 2:], alone, rtol=1e-12)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fields", [{}, dict(residual="normalized", steps=3, mlp_steps=1)])
def test_the_last_state_is_the_result(name, dtype, fields):
    layer = sublayer(full_config(**fields), name, np.float32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), dtype)
    states, result = jax.jit(lambda x: (layer.states(x), layer(x)))(x)
    # In bfloat16, XLA of jax 0.10 may skip the rounding between steps in one of the two programs
    spacing = 2.0**-7 * np.abs(np.asarray(result, np.float32)).max() if dtype == "bfloat16" else 0.0
    for last, whole in ((states[-1], result), (jax.jit(layer.states)(x)[-1], jax.jit(layer)(x))):
        last, whole = np.asarray(last, np.float32), np.asarray(whole, np.float32)
        np.testing.assert_allclose(last, whole, rtol=0, atol=spacing)


@pytest.mark.parametrize("name", KINDS)
def test_an_update_is_not_rounded_to_the_state(name):
    """In bfloat16, x + update − x would lose an update as small as the last digits of x."""
    layer = sublayer(full_config(step_size=1e-3, mlp_step_size=1e-3), name, np.float32)
    x, h = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 5, 8)), jnp.float32)
    exact = layer.update(x, h)
    low = layer.update(x.astype(jnp.bfloat16), h.astype(jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    error = jnp.linalg.norm(low.astype(jnp.float32) - exact)
    assert error < 0.03 * jnp.linalg.norm(exact)

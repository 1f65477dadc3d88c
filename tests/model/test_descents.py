"""Measurements of the layers' descent: against NumPy, and where the answer is known."""

import descent_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_configs import full_config, model_config, random_parameters

from cem_jax.train.probe import measure

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 7))
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]])


def measured(config, parameters=None, segments=None):
    parameters = random_parameters(config) if parameters is None else parameters
    run = jax.jit(lambda p: measure(config, p, TOKENS, segments))
    return jax.tree.map(np.asarray, run(jax.tree.map(jnp.asarray, parameters)))


def with_attention(config, change):
    """Return random float32 parameters with those of attention changed."""
    parameters = random_parameters(config, np.float32)
    blocks = parameters["blocks"]
    attention = blocks["attention"] | change(blocks["attention"])
    return parameters | {"blocks": blocks | {"attention": attention}}


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(diagonal="per_head", diagonal_in_update=True, position="rope"),
        dict(residual="normalized", step_norm="separate", norm_gradient="full"),
        dict(step_norm="none", diagonal="none", self_bias=False, preconditioner="none"),
        dict(preconditioner_form="psd", preconditioner_heads="shared", learn_step_size=True),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) or "paper",
)
def test_against_numpy(fields, x64):
    config = full_config(**{"steps": 3, **fields})
    segments = None if "position" in fields else SEGMENTS
    found = measured(config, segments=segments)
    expected = descent_oracle.descents(config, random_parameters(config), TOKENS, segments)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    # the errors of central differences, and of bisecting an eigenvalue to 30 binary digits
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-6), found, expected)


def test_only_sublayers_that_have_an_energy():
    config = model_config(kind="llama", position="rope")
    assert set(measured(config, random_parameters(config, np.float32))) == {"mlp"}


def test_uniform_attention():
    """With zero queries and no positions all α_ij are 1/i, so the entropy is ln i."""
    config = model_config(position="none", steps=2)
    parameters = with_attention(config, lambda p: {"query": 0 * p["query"]})
    found = measured(config, parameters)["attention"]
    count = np.arange(1, TOKENS.shape[1] + 1)
    np.testing.assert_allclose(found["entropy"], np.log(count).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["self_mass"], (1 / count).mean(), rtol=1e-5)


def test_attention_to_oneself():
    config = model_config(position="none", self_bias=True)
    parameters = with_attention(config, lambda p: {"self_bias": p["self_bias"] + 1000})
    found = measured(config, parameters)["attention"]
    np.testing.assert_allclose(found["entropy"], 0.0, atol=1e-3)  # float32, at scores of 1000
    np.testing.assert_allclose(found["self_mass"], 1.0, rtol=1e-6)


def test_nothing_rises_where_descent_is_provable():
    """With a weightless norm, no P and no diagonal, ε never rises for any η."""
    config = model_config(steps=4, step_norm="weightless", step_size=3.0)
    found = measured(config, random_parameters(config, np.float32))["attention"]
    assert (found["rise_fraction"] == 0).all()
    assert (found["energy_change"] < 0).all()


def test_a_concave_energy_falls_more_than_its_slope_predicts(x64):
    config = model_config(steps=3, step_norm="none")
    assert (measured(config)["attention"]["descent_ratio"] >= 1).all()


def test_short_steps_go_straight_and_fall_as_predicted(x64):
    config = full_config(steps=2, step_size=1e-5, mlp_step_size=1e-5)
    for found in measured(config).values():
        np.testing.assert_allclose(found["descent_ratio"], 1.0, atol=1e-3)
        np.testing.assert_allclose(found["cosine"], 1.0, atol=1e-3)

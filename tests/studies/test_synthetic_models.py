"""The regressors of Table 3: sizes, values, training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.studies.synthetic.data import Data, make_data
from cem_jax.studies.synthetic.models import MODELS, apply, initialise, sizes
from cem_jax.studies.synthetic.training import fit

# Table 3: parameters, FLOPs of a forward pass
TABLE = {
    "plain": (33_985, 6_758_400),
    "gated": (33_941, 6_732_800),
    "cem_t1": (22_657, 6_732_800),
    "cem_t2": (22_657, 11_084_800),
    "cem_t4": (22_657, 19_788_800),
    "cem_t8": (22_657, 37_196_800),
}


def parameters(name):
    """Draw parameters, none of which has a special value."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: initialise(MODELS[name], jax.random.key(0)))
    centre = lambda name: 1.0 if "norm" in name else 0.0
    return {n: centre(n) + 0.3 * rng.normal(size=leaf.shape) for n, leaf in shapes.items()}


def test_sizes_are_table_3s():
    found = {name: (sizes(m)["parameters"], sizes(m)["flops"]) for name, m in MODELS.items()}
    assert found == TABLE


@pytest.mark.parametrize("name", ["gated", "cem_t2"])
def test_flops_are_those_of_the_compiled_program(name):
    """XLA also counts biases, activations and the inner norms, which are small in comparison."""
    model = MODELS[name]
    shapes = jax.eval_shape(lambda: initialise(model, jax.random.key(0)))
    inputs = jax.ShapeDtypeStruct((100, 10), jnp.float32)
    compiled = jax.jit(lambda p, x: apply(model, p, x)).lower(shapes, inputs).compile()
    counted = compiled.cost_analysis()["flops"]
    assert 1.0 < counted / sizes(model)["flops"] < 1.1


def norm(x, weight):
    return weight * x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)


def silu(z):
    return z / (1 + np.exp(-z))


def sublayer(p, x, model):
    """Compute the sublayer in NumPy, from the equations."""
    h = norm(x, p["norm"])
    if model.kind == "plain":
        return x + silu(h @ p["up"].T + p["up_bias"]) @ p["down"].T + p["down_bias"]
    if model.kind == "gated":
        gate, up = h @ p["gate"].T + p["gate_bias"], h @ p["up"].T + p["up_bias"]
        return x + (silu(gate) * up) @ p["down"].T + p["down_bias"]
    for _ in range(model.steps):
        x = x + (h @ p["multiplier"].T * silu(norm(x, p["norm"]) @ p["tied"].T)) @ p["tied"]
    return x


@pytest.mark.parametrize("name", ["plain", "gated", "cem_t1", "cem_t4"])
def test_predictions_against_numpy(name, x64):
    p, inputs = parameters(name), np.random.default_rng(1).uniform(-1, 1, (5, 10))
    x = sublayer(p, inputs @ p["input"].T + p["input_bias"], MODELS[name])
    expected = norm(x, p["output_norm"]) @ p["output"][0] + p["output_bias"]
    found = jax.jit(lambda p, x: apply(MODELS[name], p, x))(p, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_training_learns_and_seeds_are_apart():
    draws = [make_data("rbf", seed, 300, 200) for seed in range(2)]
    data = Data(*(np.stack(arrays) for arrays in zip(*draws, strict=True)))
    told = []
    both = fit(MODELS["cem_t2"], data, 2, 60, told.append)
    assert told == [60]
    assert both.test.shape == (2,)
    assert (both.train < 0.6 * data.y.std(axis=1)).all()
    first = fit(MODELS["cem_t2"], Data(*(array[:1] for array in data)), 1, 60)
    np.testing.assert_allclose(both.test[:1], first.test, rtol=1e-3)

"""The six regressors of Table 3: input, one MLP sublayer of width 64, output.

    x = W_in input + b_in          sublayer(x)          y = w_out·RMSNorm(x) + b_out

Plain    x + W_2 σ(W_1 h + b_1) + b_2                       h = RMSNorm(x)
Gated    x + W_d(σ(W_g h + b_g) ∘ (W_u h + b_u)) + b_d
CEM      T steps down ξ from x, in the context h; no biases, η = 1, no P

σ is SiLU in all three. CEM's recursion uses the norm before the sublayer.

Shapes: N points · I inputs · D = 64 model dim · M hidden.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from cem_jax.energy import StepNorm, StepRule, at_state, descend, elementwise_energy, rms_norm
from cem_jax.sharding.linear import project

POINTS = 100  # in the forward pass whose FLOPs Table 3 gives
_INPUTS, _DIM = 10, 64
_EPS = 1e-6
_NORM_FLOPS = 5  # per element

Parameters = dict[str, Any]


class Model(NamedTuple):
    """A regressor: the kind and width of its sublayer, and the number of steps for CEM."""

    title: str
    kind: str  # plain | gated | cem
    hidden: int
    steps: int = 1


MODELS = {
    "plain": Model("Plain", "plain", 256),
    "gated": Model("Gated", "gated", 170),
    "cem_t1": Model("CEM-T1", "cem", 170, 1),
    "cem_t2": Model("CEM-T2", "cem", 170, 2),
    "cem_t4": Model("CEM-T4", "cem", 170, 4),
    "cem_t8": Model("CEM-T8", "cem", 170, 8),
}


def initialise(model: Model, key: Array) -> Parameters:
    """Return parameters: weights from N(0, 1/fan-in), biases 0, norms 1."""
    shapes = {"input": (_DIM, _INPUTS), "output": (1, _DIM)}
    biases = {"input_bias": _DIM, "output_bias": 1}
    wide, narrow = (model.hidden, _DIM), (_DIM, model.hidden)
    if model.kind == "plain":
        shapes |= {"up": wide, "down": narrow}
        biases |= {"up_bias": model.hidden, "down_bias": _DIM}
    elif model.kind == "gated":
        shapes |= {"gate": wide, "up": wide, "down": narrow}
        biases |= {"gate_bias": model.hidden, "up_bias": model.hidden, "down_bias": _DIM}
    else:
        shapes |= {"multiplier": wide, "tied": wide}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    weights = {
        name: jax.random.normal(keys[name], shape) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    zeros = {name: jnp.zeros(size) for name, size in biases.items()}
    return weights | zeros | {"norm": jnp.ones(_DIM), "output_norm": jnp.ones(_DIM)}


def apply(model: Model, p: Parameters, inputs: Float[Array, "N I"]) -> Float[Array, " N"]:
    """Return the model's predictions."""
    affine = lambda x, name: project(x, p[name]) + p[f"{name}_bias"][None]
    x_ND = affine(inputs, "input")
    h_ND = rms_norm(x_ND, p["norm"], _EPS)
    if model.kind == "plain":
        x_ND += affine(jax.nn.silu(affine(h_ND, "up")), "down")
    elif model.kind == "gated":
        x_ND += affine(jax.nn.silu(affine(h_ND, "gate")) * affine(h_ND, "up"), "down")
    else:
        gamma_NM = project(h_ND, p["multiplier"])
        energy = lambda u: elementwise_energy(u, gamma_NM, p["tied"]).sum()
        force = at_state(lambda u: -jax.grad(energy)(u), StepNorm(p["norm"], _EPS))
        x_ND = descend(force, x_ND, StepRule(1.0), steps=model.steps)
    return affine(rms_norm(x_ND, p["output_norm"], _EPS), "output")[:, 0]


def sizes(model: Model, batch: int = POINTS) -> dict[str, int]:
    """Return `parameters`, and `flops` of a forward pass over `batch` points, from the shapes.

    Two FLOPs per multiply-add, five per normed element; biases, activations and the norm inside the
    recursion do not count, as in the paper.
    """
    shapes = jax.eval_shape(lambda: initialise(model, jax.random.key(0)))
    # every step uses the tied weight twice: to the hidden coordinates and back
    uses = {"tied": 2 * model.steps}
    products = sum(2 * x.size * uses.get(name, 1) for name, x in shapes.items() if x.ndim == 2)
    norms = sum(_NORM_FLOPS * x.size for name, x in shapes.items() if "norm" in name)
    return {
        "parameters": sum(x.size for x in shapes.values()),
        "flops": batch * (products + norms),
    }

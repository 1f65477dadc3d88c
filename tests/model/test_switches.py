"""Every choice that the paper leaves open, against the oracle, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from model_configs import full_config, model_config, random_parameters

from cem_jax.model import CEMAttention, pure
from cem_jax.model.parameters import with_values
from cem_jax.model.transformer import ATTENTION, MLP

TOKENS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 0]])
SEGMENTS = [[0, 0, 1, 1, 1], [2, 2, 2, 2, 4]]
EXACT = dict(diagonal_in_update=True)
PER_HEAD = dict(diagonal="per_head")
SHARED_P = dict(preconditioner_heads="shared")
LLAMA = dict(kind="llama", position="rope", self_bias=False)

# (switched fields, whether they change the outputs)
SWITCHES = [
    (dict(residual="normalized"), True),
    (dict(step_norm="separate"), True),
    (dict(step_norm="weightless"), True),
    (dict(step_norm="none"), True),
    (dict(norm_gradient="scaled"), True),
    (dict(norm_gradient="full"), True),
    (dict(norm_gradient="full", step_norm="weightless"), True),
    (dict(steps=1), True),
    (dict(step_size=0.5), True),
    (dict(learn_step_size=True), True),
    (dict(diagonal="none"), True),
    (PER_HEAD, True),
    (EXACT, True),
    (EXACT | SHARED_P, True),
    (EXACT | dict(preconditioner="none"), True),
    (EXACT | PER_HEAD, True),
    (EXACT | PER_HEAD | SHARED_P, True),
    (EXACT | PER_HEAD | dict(preconditioner="diagonal"), True),
    (EXACT | dict(position="rope"), True),
    (dict(position="rope"), True),
    (dict(position="rope", update="closed_form"), True),
    (dict(position="rope", rope_base=10.0), True),
    (dict(position="none"), True),
    (dict(alibi_slopes="press"), True),
    (dict(self_bias=False), True),
    (dict(tau="sqrt_model_dim"), True),
    (dict(tau="0.7"), True),
    (dict(preconditioner="none"), True),
    (dict(preconditioner="diagonal"), True),
    (dict(preconditioner_form="psd"), True),
    (SHARED_P, True),
    (dict(update="closed_form"), False),
    (EXACT | dict(implementation="blockwise", block_sizes=(3, 2)), True),
    (dict(remat_steps=True), False),
    (LLAMA, True),
    (LLAMA | dict(position="alibi", self_bias=True, steps=1), True),
    (dict(mlp_steps=1), True),
    (dict(mlp_step_size=0.5), True),
    (dict(mlp_learn_step_size=True), True),
    (dict(mlp_activation="gelu"), True),
    (dict(mlp_activation="relu"), True),
    (dict(mlp_preconditioner="none"), True),
    (dict(mlp_preconditioner="diagonal"), True),
    (dict(mlp_preconditioner_form="psd"), True),
    (dict(mlp_update="closed_form"), False),
    (dict(mlp_remat_steps=True), False),
    (dict(mlp_kind="gated"), True),
    (dict(mlp_kind="gated", mlp_activation="gelu", mlp_steps=1), True),
]


def switched(**fields):
    return full_config(layers=1, scan_layers=False, **fields)


def is_about(name, fields):
    """Return whether a switch of the model, of attention or of the MLP concerns that sublayer."""
    of_model = {"residual", "step_norm", "norm_gradient"}
    of_mlp = any(field.startswith("mlp_") for field in fields)
    return set(fields) <= of_model or of_mlp == (name == "mlp")


def name_of(fields):
    return "-".join(f"{name}={value}" for name, value in fields.items())


def sublayer(config, name, parameters):
    """Return an attention or MLP sublayer with these parameters."""
    kinds = {"attention": ATTENTION[config.attention.kind], "mlp": MLP[config.mlp.kind]}
    return with_values(lambda: kinds[name](config, rngs=nnx.Rngs(0)), parameters)


def expected(config, name, parameters, x):
    return np.stack([getattr(oracle, name)(config, parameters, row) for row in x])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "fields", "changes"),
    [
        (name, fields, changes)
        for fields, changes in SWITCHES
        for name in ("attention", "mlp")
        if is_about(name, fields)
    ],
    ids=lambda v: name_of(v) if isinstance(v, dict) else v if isinstance(v, str) else "",
)
def test_switch(name, fields, changes):
    config = switched(**fields)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, config.dim))
    bar = rng.normal(size=x.shape)
    parameters = oracle.layer_of(random_parameters(config), 0)[name]
    truth = expected(config, name, parameters, x)

    def objective(parameters, x):
        y = sublayer(config, name, parameters)(x)
        return jnp.vdot(y, bar), y

    # not jitted, because compiling takes longer; blockwise only runs compiled
    with jax.disable_jit(config.attention.implementation == "dense"):
        gradient, y = jax.grad(objective, argnums=(0, 1), has_aux=True)(parameters, x)
    np.testing.assert_allclose(y, truth, rtol=1e-9, atol=1e-11)

    default = switched()
    usual = expected(default, name, oracle.layer_of(random_parameters(default), 0)[name], x)
    assert (np.abs(truth - usual).max() > 1e-3) == changes

    # the oracle's slope along a random direction is the gradient's
    direction = jax.tree.map(lambda p: rng.normal(size=p.shape), (parameters, x))
    move = lambda step: jax.tree.map(lambda p, v: p + step * v, (parameters, x), direction)
    rise = np.vdot(expected(config, name, *move(1e-5)) - expected(config, name, *move(-1e-5)), bar)
    slope = sum(np.vdot(g, v) for g, v in zip(*map(jax.tree.leaves, (gradient, direction))))  # noqa: B905
    assert slope == pytest.approx(rise / 2e-5, rel=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("fields", "segments"),
    [
        ({}, None),
        (dict(tie_embeddings=True, norm_eps=0.1, steps=3), SEGMENTS),
        (LLAMA | dict(mlp_kind="gated"), SEGMENTS),
        (LLAMA, None),
        (dict(mlp_kind="gated", implementation="blockwise"), SEGMENTS),
    ],
)
def test_whole_model(fields, segments):
    config = full_config(**fields)
    parameters = random_parameters(config)
    run = jax.jit(lambda p: pure.bind(config, p)(TOKENS, segments and jnp.array(segments)))
    truth = oracle.logits(config, parameters, TOKENS, segments)
    np.testing.assert_allclose(run(parameters), truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("form", "init", "diagonal"), [("symmetric", "paper", 1.3133), ("psd", "identity", 1.0)]
)
def test_initial_preconditioners(form, init, diagonal):
    config = model_config(
        preconditioner="diagonal_low_rank", preconditioner_form=form, preconditioner_init=init
    )
    p = CEMAttention(config, rngs=nnx.Rngs(0)).preconditioner
    np.testing.assert_allclose(jax.nn.softplus(p.p[...] * p.scale), diagonal, rtol=1e-4)
    assert 0.01 < np.std(p.left[...]) < 0.03
    assert p.right is None if form == "psd" else not p.right[...].any()

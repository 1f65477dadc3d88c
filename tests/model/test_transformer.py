"""The decoder: ways to run its layers, causality, documents, precision and steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_configs import full_config, model_config, random_parameters

from cem_jax.config import with_steps
from cem_jax.model import pure

TOKENS = np.array([[3, 1, 4, 10, 5, 9, 2, 6]])
LLAMA = dict(kind="llama", position="rope", self_bias=False, mlp_kind="gated")
EXACT = dict(diagonal="per_head", diagonal_in_update=True)
KINDS = [{}, LLAMA, EXACT | dict(position="rope", update="closed_form")]


def run(config, parameters, *args, **kwargs):
    return jax.jit(lambda p: pure.bind(config, p)(*args, **kwargs))(parameters)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        (dict(mlp_steps=1), [("none", False), ("dots", True), ("full", True), ("full", False)]),
        (LLAMA | dict(steps=1, mlp_steps=1), [("none", False), ("full", True)]),
    ],
    ids=["cem", "llama"],
)
def test_scanned_unrolled_and_rematerialised_layers_agree(kind, ways):
    plain = full_config(**kind)
    parameters = random_parameters(plain)

    def logits_and_gradient(config):
        def objective(p):
            logits = pure.bind(config, p)(TOKENS)
            return jnp.sin(logits).sum(), logits

        return jax.jit(jax.grad(objective, has_aux=True))(parameters)

    expected = logits_and_gradient(plain)
    for remat, scanned in ways:
        found = logits_and_gradient(dataclasses.replace(plain, remat=remat, scan_layers=scanned))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), found, expected
        )


def kept_for_backward(**fields):
    """Return how many numbers the forward pass keeps for the backward pass."""
    config = full_config(**fields)
    forward = lambda p: jax.vjp(lambda p: pure.bind(config, p)(TOKENS), p)[1]
    kept = jax.eval_shape(forward, pure.abstract_parameters(config))
    return sum(leaf.size for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize("scanned", [True, False])
def test_rematerialisation_is_really_on(scanned):
    kept = lambda **fields: kept_for_backward(
        **fields, scan_layers=scanned, implementation="blockwise"
    )
    full, attention, dots, everything = (
        kept(remat=remat) for remat in ("full", "attention", "dots", "none")
    )
    assert full < attention < dots < everything
    config = full_config()
    o_and_lse = TOKENS.size * (config.dim + config.attention.heads)
    assert attention - full == config.layers * config.attention.steps * o_and_lse
    steps = kept(remat_steps=True, mlp_remat_steps=True)
    assert full < steps < everything


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", KINDS, ids=["cem", "llama", "exact"])
def test_no_position_depends_on_a_later_one(kind):
    config = full_config(**kind)
    parameters = random_parameters(config)

    def before(embedding, cut):
        logits = pure.bind(config, parameters | {"embedding": embedding})(TOKENS)
        return jnp.where(jnp.arange(8)[:, None] < cut, jnp.sin(logits[0]), 0).sum()

    gradient = jax.jit(jax.grad(before))
    for cut in (1, 4, 7):
        by_token = np.abs(gradient(parameters["embedding"], cut)).sum(1)[TOKENS[0]]
        assert by_token[:cut].all() and not by_token[cut:].any()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "kind",
    [{}, LLAMA, dict(position="rope", implementation="blockwise", block_sizes=(2, 3))],
    ids=["cem", "llama", "rope-blockwise"],
)
def test_packed_documents_give_the_outputs_of_single_ones(kind):
    config = full_config(**kind)
    parameters = random_parameters(config)
    packed = run(config, parameters, TOKENS, jnp.array([[7, 7, 7, 2, 2, 2, 2, 2]]))
    for part in (slice(0, 3), slice(3, 8)):
        alone = run(config, parameters, TOKENS[:, part])
        np.testing.assert_allclose(packed[:, part], alone, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [{}, LLAMA], ids=["cem", "llama"])
def test_parameters_fit_any_number_of_steps(kind):
    two = full_config(**kind)
    parameters = random_parameters(two)
    for attention, mlp in ((1, 3), (3, 1)):
        other = full_config(**kind, steps=attention, mlp_steps=mlp)
        assert pure.abstract_parameters(other) == pure.abstract_parameters(two)
        asked = with_steps(two, attention, mlp)
        assert asked == other
        layers = run(two, parameters, TOKENS), run(asked, parameters, TOKENS)
        assert not np.allclose(*layers)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("position", ["alibi", "none"])
def test_one_plain_step_is_a_llama_block_with_tied_weights(position):
    common = dict(position=position, self_bias=True, steps=1, mlp_steps=1)
    cem, llama = model_config(**common), model_config(**LLAMA | common)
    ours = random_parameters(cem)
    a, m = ours["blocks"]["attention"], ours["blocks"]["mlp"]
    attention = {**a, "value": a["key"], "output": a["query"]}
    mlp = {"norm": m["norm"], "up": m["multiplier"], "gate": m["tied"], "down": m["tied"]}
    twins = ours | {"blocks": {"attention": attention, "mlp": mlp}}
    np.testing.assert_allclose(
        run(cem, ours, TOKENS), run(llama, twins, TOKENS), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    "kind", [dict(learn_step_size=True), LLAMA | dict(steps=1, mlp_steps=1)], ids=["cem", "llama"]
)
def test_bfloat16(kind):
    config = full_config(**kind, layers=1)
    parameters = jax.tree.map(lambda p: p * 0.3, random_parameters(config, np.float32))

    def objective(parameters, dtype):
        logits = pure.bind(config, parameters)(TOKENS, dtype=dtype)
        return jnp.square(logits.astype(jnp.float32)).sum(), logits

    both = [
        jax.jit(jax.grad(objective, has_aux=True), static_argnums=1)(parameters, dtype)
        for dtype in (jnp.bfloat16, None)
    ]
    assert both[0][1].dtype == jnp.bfloat16 and both[1][1].dtype == jnp.float32
    for low, high in zip(*map(jax.tree.leaves, both), strict=True):
        error = np.linalg.norm(np.float32(low) - high) / np.linalg.norm(high)
        assert error < 0.08
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(both[0][0]))


@pytest.mark.parametrize("wrong", [11, -1, 2**31 - 1])
def test_ids_out_of_range_give_nan(wrong):
    """They must not give the nearest row or count from the end. Earlier positions of the sequence
    may see the NaN too, with weight 0."""
    config = model_config()
    tokens = TOKENS.copy()
    tokens[0, 5] = wrong
    logits = run(config, random_parameters(config, np.float32), tokens)
    assert np.isnan(logits[:, 5:]).all()


def test_one_position():
    config = full_config(implementation="auto")
    logits = run(config, random_parameters(config, np.float32), TOKENS[:, :1])
    assert logits.shape == (1, 1, 11) and np.isfinite(logits).all()

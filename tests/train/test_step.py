"""The training step: accumulation, schedule, decay, and steps that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_config

from cem_jax.model import pure
from cem_jax.train.optimizer import adamw, decay_mask, learning_rate
from cem_jax.train.step import initial_state, make_train_step

TOTAL = 8


def batches(count: int, *, rows: int = 8, weighted: bool = False) -> list[dict]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        batch = {"tokens": rng.integers(0, 320, (rows, 33), np.int32)}
        if weighted:  # rows with very unequal numbers of real targets
            lengths = rng.integers(1, 33, (rows, 1))
            batch["weights"] = (np.arange(32)[None] < lengths).astype(np.float32)
        made.append(batch)
    return made


def run(config, data):
    state = jax.jit(lambda: initial_state(config))()
    step = jax.jit(make_train_step(config, TOTAL))
    measured = []
    for batch in data:
        state, metrics = step(state, batch)
        measured.append(jax.device_get(metrics))
    return jax.device_get(state), measured


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_equals_the_big_batch(accumulation, weighted):
    data = batches(4, weighted=weighted)
    whole, measured = run(tiny_config(train__global_batch=8), data)
    micro = tiny_config(train__global_batch=8, train__microbatch=8 // accumulation)
    parts, measured_parts = run(micro, data)
    for one, other in zip(measured, measured_parts, strict=True):
        assert one.learning_rate == other.learning_rate
        np.testing.assert_allclose(one.loss, other.loss, rtol=1e-6)
    # Adam divides by |gradient| + 1e-9: summing in another order moves a parameter by a part of η
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_one_step_is_optax_adamw():
    config = tiny_config(optimizer__warmup_fraction=0.0)
    (batch,) = batches(1)
    state = initial_state(config)
    new, metrics = make_train_step(config, TOTAL)(state, batch)

    def loss(params):
        logits = pure.bind(config.model, params)(batch["tokens"][:, :-1])
        targets = batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    o = config.optimizer
    eta = learning_rate(jnp.zeros((), jnp.int32), o, TOTAL)
    plain = optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.adamw(
            eta, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decay_mask(o, config.model)
        ),
    )
    updates, _ = plain.update(grads, plain.init(state.params), state.params)
    want = optax.apply_updates(state.params, updates)
    np.testing.assert_allclose(metrics.loss, value, rtol=1e-6)
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(grads), rtol=1e-5)
    for one, other in zip(jax.tree.leaves(new.params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)  # as above: |gradient| near ε


def test_learning_rate_warms_up_and_decays_to_its_final_fraction():
    config = tiny_config(optimizer__warmup_fraction=0.1).optimizer
    rates = np.array([learning_rate(jnp.int32(s), config, 100) for s in range(100)])
    np.testing.assert_allclose(rates[:10], config.learning_rate * np.arange(1, 11) / 10, rtol=1e-6)
    assert np.all(np.diff(rates[10:]) < 0)
    np.testing.assert_allclose(rates[-1], 0.1 * config.learning_rate, rtol=1e-6)
    assert learning_rate(jnp.int32(0), config, 1) > 0  # a run of one step learns


def test_learning_rate_resumes_by_the_tokens_seen():
    config = tiny_config(optimizer__warmup_fraction=0.1).optimizer
    rate = lambda step, total, ahead=0.0: float(
        learning_rate(jnp.int32(step), config, total, ahead)
    )
    # after 50 of 100 steps, 25 steps twice as large: like the last 25 of a run of 50 such steps
    for step in range(50, 75):
        np.testing.assert_allclose(rate(step, 75, -25.0), rate(step - 25, 50), rtol=1e-6)


def test_decay_reaches_matrices_and_embeddings_only():
    config = tiny_config()
    mask = decay_mask(config.optimizer, config.model)
    assert mask["embedding"] and mask["head"] and mask["blocks"]["attention"]["query"]
    assert mask["blocks"]["mlp"]["preconditioner"]["left"]
    attention = mask["blocks"]["attention"]
    flat = [attention["norm"], attention["diagonal"], attention["self_bias"], mask["norm"]]
    assert not any([*flat, attention["preconditioner"]["p"]])
    everything = decay_mask(tiny_config(optimizer__decay_mask="all").optimizer, config.model)
    assert all(jax.tree.leaves(everything))


def test_a_step_that_is_not_finite_changes_nothing_but_the_counters():
    config = tiny_config(train__global_batch=8)
    data = batches(4)
    data[1]["tokens"][3, 5] = 99_999  # out of range: its embedding is NaN
    state = jax.jit(lambda: initial_state(config))()
    step = jax.jit(make_train_step(config, TOTAL))
    history = []
    for batch in data:
        before = jax.device_get(state)
        state, metrics = step(state, batch)
        history.append((before, jax.device_get(state), jax.device_get(metrics)))
    before, after, metrics = history[1]
    assert not np.isfinite(metrics.loss)
    for one, other in zip(
        jax.tree.leaves((before.params, before.opt_state)),
        jax.tree.leaves((after.params, after.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    assert (after.step, after.bad_steps, after.skipped_steps) == (2, 1, 1)
    _, last, metrics = history[3]
    assert (last.step, last.bad_steps, last.skipped_steps) == (4, 0, 1)
    assert np.isfinite(metrics.loss)


def test_bfloat16_stays_close_and_keeps_float32_parameters():
    data = batches(4)
    _, measured = run(tiny_config(train__global_batch=8), data)
    rough, measured_rough = run(
        tiny_config(train__global_batch=8, train__compute_dtype="bfloat16"), data
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(rough.params)} == {np.dtype(np.float32)}
    losses = [[float(m.loss) for m in one] for one in (measured, measured_rough)]
    np.testing.assert_allclose(*losses, rtol=5e-3)  # bfloat16 rounds to 1 part in 256


def test_the_optimizer_state_has_the_shapes_of_the_parameters():
    config = tiny_config()
    params = pure.initialise(config.model, jax.random.key(0))
    state = adamw(config.optimizer, config.model).init(params)
    shapes = lambda tree: [leaf.shape for leaf in jax.tree.leaves(tree)]
    assert shapes(state[1].mu) == shapes(params) == shapes(state[1].nu)

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.energy import Loop, StepNorm, StepRule, at_state, descend, rms_norm, trajectory
from cem_jax.energy.norm import force_at_state

EPS = 1e-6


def energy(u):
    return jnp.sum(jnp.cos(u) + 0.1 * u**4, axis=-1)


force = lambda u: -jax.grad(lambda u: energy(u).sum())(u)


def normed(x, weight):
    u = np.asarray(x) / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + EPS)
    return u if weight is None else u * weight


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm(x64, leading, weighted):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(*leading, 5)), rng.normal(size=5) if weighted else None
    np.testing.assert_allclose(
        rms_norm(jnp.asarray(x), weight if weight is None else jnp.asarray(weight), EPS),
        normed(x, weight),
        rtol=1e-12,
    )


def test_rms_norm_in_low_precision_rounds_once():
    x = jnp.asarray(300 * np.random.default_rng(1).normal(size=(4, 64)), jnp.float16)
    u = rms_norm(x, jnp.ones(64, jnp.float32), EPS)  # its squares would overflow float16
    assert u.dtype == jnp.float16
    expected = normed(np.asarray(x, np.float64), None)
    np.testing.assert_allclose(u, expected, rtol=2.0**-10, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_force_through_the_norm_equals_autodiff(x64, weighted):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(3, 5)))
    weight = jnp.asarray(rng.normal(size=5)) if weighted else None
    at_u = force(rms_norm(x, weight, EPS))
    through = lambda f, at: -jax.grad(lambda t: energy(f(t)).sum())(at)
    scaled_by = 1.0 if weight is None else weight[None]
    expected = {
        "at_u": at_u,
        "scaled": through(lambda n: n * scaled_by, rms_norm(x, None, EPS)),
        "full": through(lambda x: rms_norm(x, weight, EPS), x),
    }
    for mode, moved in expected.items():
        np.testing.assert_allclose(
            force_at_state(at_u, x, StepNorm(weight, EPS, mode)),
            moved,
            rtol=1e-11,
            atol=1e-13,
            err_msg=mode,
        )
    with pytest.raises(ValueError, match="at_u, scaled or full; got 'none'"):
        force_at_state(at_u, x, StepNorm(weight, EPS, "none"))


@pytest.mark.parametrize(
    ("gradient", "steps"), [("at_u", 0), ("at_u", 1), ("none", 3), ("scaled", 3), ("full", 3)]
)
def test_descent_is_the_loop_and_remat_changes_nothing(x64, gradient, steps):
    rng = np.random.default_rng(3)
    arrays = dict(
        x=jnp.asarray(rng.normal(size=(2, 3, 5))),
        weight=jnp.asarray(rng.normal(size=5)),
        matrix=jnp.asarray(rng.normal(size=(5, 5))),
        step_size=jnp.asarray(0.3),
    )
    bar = rng.normal(size=(2, 3, 5))
    norm_of = lambda t: None if gradient == "none" else StepNorm(t["weight"], EPS, gradient)
    force_of = lambda t: lambda u: jnp.tanh(u @ t["matrix"][None])

    def scanned(t, run=descend, **how):
        force = at_state(force_of(t), norm_of(t))
        return run(force, t["x"], StepRule(t["step_size"]), steps=steps, **how)

    def loop(t):
        x, norm = t["x"], norm_of(t)
        for _ in range(steps):
            u = x if norm is None else rms_norm(x, *norm[:2])
            moved = force_of(t)(u)
            if norm is not None:
                moved = force_at_state(moved, x, norm)
            x = x + t["step_size"] * moved
        return x

    def results(f):
        both = lambda t: (f(t), jax.grad(lambda t: (bar * f(t)).sum())(t))
        return jax.jit(both)(arrays)

    expected = results(loop)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    jax.tree.map(same, results(scanned), expected)
    remat = Loop(unroll=1, remat=jax.checkpoint)
    jax.tree.map(same, results(lambda t: scanned(t, loop=remat)), expected)
    jax.tree.map(same, results(lambda t: scanned(t, run=trajectory)[-1]), expected)


def test_remat_keeps_only_the_states_between_steps():
    """Without remat, each step keeps its hidden activations for the backward pass."""
    x, weight = jnp.ones((64, 8)), jnp.ones((8, 256))

    def temporary(remat):
        inner = lambda w: lambda u: jnp.tanh(jnp.sin(u @ w)) @ w.T
        loop = Loop(unroll=1, remat=jax.checkpoint if remat else None)
        loss = lambda w: descend(inner(w), x, StepRule(0.1), steps=8, loop=loop).sum()
        return jax.jit(jax.grad(loss)).lower(weight).compile().memory_analysis().temp_size_in_bytes

    assert temporary(True) < 0.5 * temporary(False)


def test_the_state_keeps_its_dtype():
    x = jnp.ones((2, 4), jnp.bfloat16)
    for step_size in (0.5, np.float32(0.5), jnp.asarray(0.5, jnp.float32)):
        force = at_state(lambda u: u, StepNorm(jnp.ones(4), EPS))
        moved = descend(force, x, StepRule(step_size), steps=2)
        assert moved.dtype == jnp.bfloat16


class HeavyBall(NamedTuple):
    """A rule with memory: v ← βv + ηF(x), x ← x + v, with the result x + δv."""

    beta: float
    delta: float

    def start(self, x):
        return x, jnp.zeros_like(x)

    def step(self, state, force):
        x, v = state
        v = self.beta * v + 0.1 * force(x)
        return x + v, v

    def result(self, state):
        x, v = state
        return x + self.delta * v


def test_descend_and_trajectory_run_a_rule_with_memory(x64):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 5)))
    rule, f = HeavyBall(0.9, 0.5), lambda x: -jnp.sinh(x)
    states = trajectory(f, x, rule, steps=3)
    np.testing.assert_array_equal(states[-1], descend(f, x, rule, steps=3))
    np.testing.assert_array_equal(states[0], x)
    at, v = x, 0.0
    for _ in range(3):
        v = 0.9 * v + 0.1 * f(at)
        at = at + v
    np.testing.assert_allclose(states[-1], at + 0.5 * v, rtol=1e-14)

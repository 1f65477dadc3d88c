import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.energy import StepNorm, descend, rms_norm
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


def test_rms_norm_in_low_precision_is_rounded_once():
    x = jnp.asarray(300 * np.random.default_rng(1).normal(size=(4, 64)), jnp.float16)
    u = rms_norm(x, jnp.ones(64, jnp.float32), EPS)  # its squares would overflow float16
    assert u.dtype == jnp.float16
    expected = normed(np.asarray(x, np.float64), None)
    np.testing.assert_allclose(u, expected, rtol=2.0**-10, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_force_through_the_norm_is_autodiffs(x64, weighted):
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
            force_at_state(at_u, x, weight, EPS, mode), moved, rtol=1e-11, atol=1e-13, err_msg=mode
        )
    with pytest.raises(ValueError, match="at_u, scaled or full; got 'none'"):
        force_at_state(at_u, x, weight, EPS, "none")


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

    def scanned(t, **how):
        return descend(
            force_of(t), t["x"], steps=steps, step_size=t["step_size"], norm=norm_of(t), **how
        )

    def loop(t):
        x, norm = t["x"], norm_of(t)
        for _ in range(steps):
            u = x if norm is None else rms_norm(x, *norm[:2])
            moved = force_of(t)(u)
            if norm is not None:
                moved = force_at_state(moved, x, *norm)
            x = x + t["step_size"] * moved
        return x

    def results(f):
        both = lambda t: (f(t), jax.grad(lambda t: (bar * f(t)).sum())(t))
        return jax.jit(both)(arrays)

    expected = results(loop)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    jax.tree.map(same, results(scanned), expected)
    jax.tree.map(same, results(lambda t: scanned(t, remat=True)), expected)


def test_remat_keeps_only_the_states_between_steps():
    """Otherwise each step leaves its hidden activations for the backward pass."""
    x, weight = jnp.ones((64, 8)), jnp.ones((8, 256))

    def temporary(remat):
        inner = lambda w: lambda u: jnp.tanh(jnp.sin(u @ w)) @ w.T
        loss = lambda w: descend(inner(w), x, steps=8, step_size=0.1, norm=None, remat=remat).sum()
        return jax.jit(jax.grad(loss)).lower(weight).compile().memory_analysis().temp_size_in_bytes

    assert temporary(True) < 0.5 * temporary(False)


def test_the_state_keeps_its_dtype():
    x = jnp.ones((2, 4), jnp.bfloat16)
    for step_size in (0.5, np.float32(0.5), jnp.asarray(0.5, jnp.float32)):
        moved = descend(
            lambda u: u, x, steps=2, step_size=step_size, norm=StepNorm(jnp.ones(4), EPS)
        )
        assert moved.dtype == jnp.bfloat16

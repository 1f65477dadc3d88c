"""Provable facts about descent: which energies fall, and at which step sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from energy_oracle import random_layer

from cem_jax.energy import (
    StepNorm,
    StepRule,
    at_state,
    descend,
    elementwise_energy,
    elementwise_force,
    interaction_energy,
    interaction_force,
    preconditioner_matrix,
    rms_norm,
)
from cem_jax.energy.activation import ACTIVATIONS, activation

ETAS = np.array([0.01, 0.3, 1.0, 3.0, 30.0, 1000.0])
ROTARY = (np.arange(6), 100.0)


def interaction_of(kind: str, seed: int):
    """Return ε and its exact force as functions of u, for six tokens."""
    rotary = ROTARY if kind == "rotary" else None
    diagonal = "none" if kind == "rotary" else kind
    layer = random_layer(np.random.default_rng(seed), positions=6, diagonal=diagonal)
    u = layer.pop("u")
    fixed = dict(layer, tau=1.4, rotary=rotary)
    energy = lambda u: interaction_energy(u, **fixed)
    force = lambda u, p=None: interaction_force(
        u, **fixed, diagonal_in_update=True, preconditioner=p
    )
    return u, energy, force


@pytest.mark.parametrize("kind", ["none", "shared", "per_head", "rotary"])
def test_the_interaction_energy_falls_by_at_least_its_first_order_term(x64, kind):
    """ε is concave: ε(x + ηPF) ≤ ε(x) − η FᵀPF for every η, P positive definite, no norm."""
    x, energy, force = interaction_of(kind, 0)
    rng = np.random.default_rng(1)
    p = preconditioner_matrix(rng.normal(size=6), rng.normal(size=(6, 2)))
    gradient = -force(x)
    moved = force(x, np.broadcast_to(p, (2, 6, 6)))
    promised = jnp.einsum("jd,de,je->j", gradient, p, gradient)
    after = jax.jit(jax.vmap(lambda eta: energy(x + eta * moved)))(ETAS)
    bound = energy(x)[None] - ETAS[:, None] * promised[None]
    assert (after <= bound + 1e-9 * np.abs(bound)).all()


@pytest.mark.parametrize(
    ("kind", "gradient"), [("none", "at_u"), ("shared", "scaled"), ("rotary", "scaled")]
)
def test_under_the_norm_the_interaction_energy_never_rises(x64, kind, gradient):
    """This holds for P = cI and any η: with a weightless norm, or weights that scale the force."""
    x, energy, force = interaction_of(kind, 2)
    weight = None
    if gradient == "scaled":
        weight = jnp.asarray(np.random.default_rng(3).normal(size=6))
    norm = StepNorm(weight, 0.0, gradient)

    @jax.jit
    @jax.vmap
    def trajectory(eta):
        states, at = [], jnp.asarray(x)
        for _ in range(5):
            states.append(energy(rms_norm(at, weight, 0.0)))
            at = descend(at_state(force, norm), at, StepRule(eta), steps=1)
        return jnp.stack(states)

    rises = np.diff(trajectory(ETAS), axis=1)
    assert rises.max() <= 1e-11
    assert rises.min() < -1e-3


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_steepest_slopes(x64, name):
    z = jnp.linspace(-20, 20, 400_001)
    slope = jax.jit(jax.grad(lambda z: activation(name).sigma(z).sum()))(z)
    assert 0 <= activation(name).slope - jnp.abs(slope).max() < 1e-5


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_elementwise_energy_falls_below_its_step_bound(x64, name):
    """The bound is η < 2 / (max|σ'| ‖γ‖_∞ ‖tied‖² ‖P‖), for P positive definite and no norm."""
    rng = np.random.default_rng(4)
    x, gamma, tied = (rng.normal(size=s) for s in ((40, 6), (40, 9), (9, 6)))
    p = preconditioner_matrix(rng.normal(size=6), rng.normal(size=(6, 2)))
    energy = jax.jit(lambda x: elementwise_energy(x, gamma, tied, activation=name))
    force = elementwise_force(x, gamma, tied, activation=name, preconditioner=p)
    square = np.linalg.norm(tied, 2) ** 2 * np.linalg.norm(p, 2)
    bound_J = 2 / (activation(name).slope * np.abs(gamma).max(-1) * square)
    for fraction in (0.01, 0.5, 0.999):
        after = energy(x + fraction * bound_J[:, None] * force)
        assert (after < energy(x)).all()

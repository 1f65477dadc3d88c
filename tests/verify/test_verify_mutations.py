"""Breaking one ingredient of the layers makes its rows fail, and no others."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verify_cases import failing, outcomes, small

from cem_jax.verify import descent, forces, special, whole


@pytest.fixture
def fresh_caches():
    """Clear compiled functions of the library, so that none outlives a mutation."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_a_force_that_loses_a_factor(monkeypatch):
    from cem_jax.energy import interaction

    whole_force = interaction.heads_together
    monkeypatch.setattr(interaction, "heads_together", lambda o, w: 0.99 * whole_force(o, w))
    rows = outcomes(forces.attention_rows(small(("float64", "float32"))))
    assert not rows["attention force, autodiff, dense"]
    assert not rows["attention force, closed form, blockwise"]
    assert not rows["attention step x + ηF, through the norm"]
    assert rows["attention energy, dense"]
    assert rows["attention force, folded P = explicit P"]  # both lose it


def test_a_lost_factor_shows_in_bfloat16(monkeypatch):
    from cem_jax.energy import interaction

    whole_force = interaction.heads_together
    monkeypatch.setattr(interaction, "heads_together", lambda o, w: 0.5 * whole_force(o, w))
    rows = [
        row
        for row in forces.attention_rows(small(("bfloat16",)))
        if row.check.startswith("attention force, autodiff")
    ]
    assert rows
    assert not any(row.passed for row in rows)


def test_an_energy_of_another_scale(monkeypatch):
    from cem_jax.energy import interaction

    total = interaction.total_log_partition
    scaled = lambda *args, **settings: 1.01 * total(*args, **settings)
    monkeypatch.setattr(interaction, "total_log_partition", scaled)
    broken = failing(forces.attention_rows(small()))
    assert "attention energy, dense" in broken
    assert "attention force, autodiff, blockwise" in broken
    assert "attention −∂ε/∂u, autodiff = closed form" in broken
    assert "attention −∂ε/∂u, central differences" in broken
    assert "attention −∂ε/∂u, d∘u held, central differences" in broken
    assert "attention force, closed form, dense" not in broken


def test_p_that_is_not_folded(monkeypatch):
    from cem_jax.model import attention, mlp

    folded = attention.folded_weights
    unfolded = lambda query, *rest: folded(query, *rest)._replace(folded=query)
    monkeypatch.setattr(attention, "folded_weights", unfolded)
    monkeypatch.setattr(mlp, "precondition", lambda weight, p: weight)
    case = small()
    broken = failing([*forces.attention_rows(case), *forces.mlp_rows(case)])
    assert "attention force, autodiff, dense" in broken
    assert "MLP force, closed form" in broken
    assert "attention force, folded P = explicit P" in broken
    assert "MLP force, folded P = explicit P" in broken


def test_an_explicit_p_without_its_second_product(monkeypatch):
    def lopsided(diagonal, left, right):
        middle = jax.nn.softplus(diagonal)[..., None] * jnp.eye(diagonal.shape[-1])[None]
        return middle + left @ jnp.matrix_transpose(right)

    monkeypatch.setattr(forces, "preconditioner_matrix", lopsided)
    assert failing(forces.attention_rows(small())) == {"attention force, folded P = explicit P"}


@pytest.mark.parametrize(
    "switches",
    [
        {"model.attention.diagonal_in_update": "True"},
        {"model.norm_gradient": "full"},
        {"model.norm_gradient": "scaled"},
    ],
    ids=lambda switches: "-".join(switches.values()),
)
def test_a_switch_that_is_ignored(monkeypatch, switches):
    case = small(**switches)
    original = forces.sublayer
    changes = {
        "True": lambda c: replace(c, attention=replace(c.attention, diagonal_in_update=False)),
        "full": lambda c: replace(c, norm_gradient="scaled"),
        "scaled": lambda c: replace(c, norm_gradient="at_u"),
    }
    change = changes[next(iter(switches.values()))]
    ignoring = lambda c, name, p: original(change(c), name, p)
    monkeypatch.setattr(forces, "sublayer", ignoring)
    assert "attention step x + ηF, through the norm" in failing(forces.attention_rows(case))


def test_another_sigma(monkeypatch):
    from cem_jax.energy import activation

    broken = activation.ACTIVATIONS["silu"]._replace(sigma=lambda x: 1.001 * jax.nn.silu(x))
    monkeypatch.setitem(activation.ACTIVATIONS, "silu", broken)
    assert failing(special.activation_rows("silu")) == {"silu: σ"}
    broken = failing(forces.mlp_rows(small()))
    assert "MLP force, closed form" in broken
    assert "MLP −∂ξ/∂u, central differences" in broken
    assert "MLP force, autodiff" not in broken


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
def test_another_phi(monkeypatch, name):
    from cem_jax.energy import activation

    whole = activation.ACTIVATIONS[name]
    broken = whole._replace(phi=lambda x: whole.phi(x) * 1.001)
    monkeypatch.setitem(activation.ACTIVATIONS, name, broken)
    assert failing(special.activation_rows(name)) == {
        f"{name}: φ' = σ, autodiff",
        f"{name}: φ' = σ, central differences",
        f"{name}: φ = ∫σ, quadrature",
    }


def test_a_bound_on_the_slope_that_does_not_hold(monkeypatch):
    from cem_jax.energy import activation

    for slope in (1.05, 1.2):  # too small, and too large
        broken = activation.ACTIVATIONS["silu"]._replace(slope=slope)
        monkeypatch.setitem(activation.ACTIVATIONS, "silu", broken)
        assert failing(special.activation_rows("silu")) == {f"silu: |σ'| at most {slope}"}


def test_an_activation_that_only_the_table_knows(monkeypatch):
    """Add z·sigmoid(2z), which `plain` does not know: the entry alone gives it rows."""
    from cem_jax.energy import activation

    silu = activation.ACTIVATIONS["silu"]
    sigma = lambda x: x * jax.nn.sigmoid(2.0 * x)
    phi = jax.custom_jvp(lambda x: silu.phi(2.0 * x) / 4.0)
    phi.defjvp(lambda primals, tangents: (phi(*primals), sigma(*primals) * tangents[0]))
    entry = silu._replace(name="swish2", sigma=sigma, phi=phi)
    monkeypatch.setitem(activation.ACTIVATIONS, "swish2", entry)
    assert not failing(special.activation_rows("swish2"))
    wrong = entry._replace(phi=lambda x: silu.phi(2.0 * x) / 2.0)
    monkeypatch.setitem(activation.ACTIVATIONS, "swish2", wrong)
    assert "swish2: φ = ∫σ, quadrature" in failing(special.activation_rows("swish2"))


def test_attention_that_sees_the_future(monkeypatch, fresh_caches):
    from cem_jax.kernels import blockwise

    distance = blockwise.Blocked.distance
    shifted = lambda blocked, x, y: distance(blocked, x, y) + 1
    monkeypatch.setattr(blockwise.Blocked, "distance", shifted)
    case = small(**{"model.attention.implementation": "blockwise"})
    broken = failing(whole.whole_rows(case))
    assert "causality: gradient from the future" in broken


def test_documents_that_see_each_other(monkeypatch):
    from cem_jax.model import Block

    original = Block.__call__
    monkeypatch.setattr(Block, "__call__", lambda self, x, segments=None: original(self, x))
    case = small(**{"data.document_mask": "True"})
    broken = failing(whole.whole_rows(case))
    assert "document mask: gradient across documents" in broken
    assert "causality: gradient from the future" not in broken


def test_training_that_does_not_see_through_the_steps(monkeypatch):
    from cem_jax.energy import interaction

    force = interaction.force_on_query
    cut = lambda q, *args, **how: force(jax.lax.stop_gradient(q), *args, **how)
    monkeypatch.setattr(interaction, "force_on_query", cut)
    broken = failing(whole.whole_rows(small()))
    assert "gradient through all T steps, attention" in broken
    assert "logits after all T steps" not in broken


def test_a_cache_one_position_late(monkeypatch):
    from cem_jax.energy import interaction

    cached = interaction.attend_cached
    late = lambda call, options, start: cached(call, options, start - 1)
    monkeypatch.setattr(interaction, "attend_cached", late)
    assert failing(whole.whole_rows(small())) == {"decode over the cache = full forward"}


def test_rotary_values_that_are_not_turned_back(monkeypatch):
    from cem_jax.energy import interaction

    rotate = interaction.rotate
    monkeypatch.setattr(
        interaction,
        "rotate",
        lambda x, rotary, inverse=False: x if inverse else rotate(x, rotary),
    )
    assert failing(special.rotary_rows(small())) == {
        "rotary: exact gradient, central differences",
        "rotary: exact gradient, autodiff",
    }


def test_other_slopes(monkeypatch):
    monkeypatch.setattr(special, "alibi_slopes", lambda heads, scheme: np.full(heads, 0.5))
    assert failing(special.slope_rows(small()))


def test_a_llama_that_is_not_tied(monkeypatch):
    from cem_jax.model import GatedMLP, LlamaAttention

    for kind in (LlamaAttention, GatedMLP):
        branch = kind.branch
        monkeypatch.setattr(
            kind, "branch", lambda self, h, _b=branch, **inputs: 1.01 * _b(self, h, **inputs)
        )
    assert failing(special.llama_rows(small())) == {
        "T=1 attention = tied Llama, Llama layer",
        "T=1 MLP = tied Llama, Llama layer",
    }


def test_steps_uphill(monkeypatch):
    from cem_jax.model.sublayer import CEMSublayer

    update = CEMSublayer.update
    monkeypatch.setattr(CEMSublayer, "update", lambda self, x, h: -update(self, x, h))
    rows = list(descent.theorem_rows(small()))
    assert len(rows) == 4
    assert not any(row.passed for row in rows)


def test_half_a_step_falls_too_little(monkeypatch):
    from cem_jax.model.sublayer import CEMSublayer

    update = CEMSublayer.update
    monkeypatch.setattr(CEMSublayer, "update", lambda self, x, h: 0.5 * update(self, x, h))
    assert [row.passed for row in descent.theorem_rows(small())] == [False, True, True, True]

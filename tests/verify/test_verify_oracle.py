"""Independent checks of the plain model and of the facts about descent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verify_cases import small

from cem_jax.energy.activation import ACTIVATIONS
from cem_jax.verify import descent, plain, report


class TestDescent:
    def test_every_theorem_holds(self):
        rows = list(descent.theorem_rows(small()))
        assert [row.check.partition(": ")[0] for row in rows] == [
            "descent, no norm, one P",
            "descent, weightless norm, at_u",
            "descent, shared norm, scaled",
            "descent, no norm, η below the bound",
        ]
        assert all(row.passed for row in rows)

    def test_a_fact_names_the_missing_premises(self):
        found = {fact.sublayer: (fact, row) for fact, row in descent.facts(small())}
        fact, row = found["attention"]
        assert row is None and not fact.provable
        for words in ("diagonal_in_update", "preconditioner=", "norm_gradient=at_u"):
            assert words in fact.reason
        assert 0 <= fact.rising <= 1
        assert "descent is not provable" in report.fact_line(fact)
        assert "norm" in found["mlp"][0].reason

    def test_with_one_p_per_head_descent_is_not_provable(self):
        switches = {"model.attention.diagonal": "none", "model.step_norm": "none"}
        fact, row = next(descent.facts(small(**switches)))
        assert row is None and "its own P" in fact.reason
        fact, row = next(descent.facts(small(**switches, **{"model.attention.heads": "1"})))
        assert fact.provable and row.passed

    def test_with_a_large_mlp_step_descent_is_not_provable(self):
        switches = {"model.step_norm": "none", "model.mlp.step_size": "50.0"}
        facts = {fact.sublayer: fact for fact, _ in descent.facts(small(**switches))}
        assert not facts["mlp"].provable
        assert "step size" in facts["mlp"].reason


class TestOracle:
    """The plain model's forces are the gradients of its energies."""

    @pytest.mark.parametrize("position", ["alibi", "rope", "none"])
    @pytest.mark.parametrize("diagonal", ["shared", "per_head", "none"])
    def test_interaction(self, x64, position, diagonal):
        case = small(
            **{
                "model.attention.position": position,
                "model.attention.diagonal": diagonal,
                "model.attention.diagonal_in_update": str(diagonal != "none"),
                "model.attention.preconditioner": "none",
            }
        )
        p = jax.tree.map(lambda leaf: jnp.asarray(leaf, "float64"), case.layer("attention"))
        u, h = (jnp.asarray(x[0], "float64") for x in case.states(2))
        energy = lambda u: plain.interaction_energy(u, h, p, None, case.model).sum()
        force = plain.interaction_force(u, h, p, None, case.model)
        np.testing.assert_allclose(force, -jax.grad(energy)(u), rtol=0, atol=1e-13)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_antiderivative(self, x64, activation):
        x, step = np.linspace(-12.0, 12.0, 50), 1e-3
        rise = plain.antiderivative(activation, x + step) - plain.antiderivative(
            activation, x - step
        )
        sigma = np.asarray(plain.sigma(activation)(jnp.asarray(x)))
        np.testing.assert_allclose(rise / (2 * step), sigma, rtol=0, atol=1e-6)
        assert abs(plain.antiderivative(activation, np.array([-45.0]))[0]) < 1e-17

    def test_slopes(self):
        np.testing.assert_array_equal(plain.slopes("power_of_two", 3), [0.5, 0.25, 0.125])
        np.testing.assert_allclose(plain.slopes("press", 8), plain.slopes("power_of_two", 8))
        np.testing.assert_allclose(plain.slopes("press", 3), [2.0**-4, 2.0**-8, 2.0**-2], rtol=1e-6)

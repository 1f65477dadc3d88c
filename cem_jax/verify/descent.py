"""Checks that an energy never rises where that is provable; measures how often it does elsewhere.

ε is concave in u: minus a log-sum-exp of affine functions. Hence, for the interaction energy with
its exact gradient and any η > 0,

* without a norm, with one positive definite P for all heads:
  ε(x + ηF) ≤ ε(x) − η gᵀPg, g = −∂ε/∂u;
* with P = I and a weightless RMSNorm, or learned weights and norm_gradient=scaled: ε never rises.

The element-wise energy ξ, without a norm and with P positive definite, never rises for
η < 2 / (max|σ'| · ‖γ‖_∞ · ‖tied‖² · ‖P‖).

Shapes: B sequences · J positions · D model dim · N steps.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cem_jax.config import ModelConfig
from cem_jax.energy.activation import activation
from cem_jax.verify import plain
from cem_jax.verify.case import Case, make_case, sublayer
from cem_jax.verify.rows import Row, eps, jit, parameters_in, precision, to_numpy

_SEQUENCES = 4
_STEPS = 6


@dataclass(frozen=True)
class Fact:
    """What is provable about the descent of one sublayer, and what was measured."""

    sublayer: str
    provable: bool
    reason: str
    rising: float  # fraction of the steps in which the energy rose
    steps: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def facts(case: Case) -> Iterator[tuple[Fact, Row | None]]:
    """Yield a fact for each CEM sublayer of the case, and a row if its descent is provable."""
    for name in ("attention", "mlp"):
        if getattr(case.model, name).kind == "cem":
            yield _fact(case, name)


def theorem_rows(case: Case) -> Iterator[Row]:
    """Yield a row for every provable fact, at the case's sizes with the switches that it needs."""
    c = case.model
    diagonal = "shared" if c.attention.diagonal == "none" else c.attention.diagonal
    attention = replace(
        c.attention, kind="cem", diagonal=diagonal, diagonal_in_update=True, step_size=1.0
    )
    one_p = replace(attention, preconditioner="diagonal_low_rank", preconditioner_heads="shared")
    no_p = replace(attention, preconditioner="none")
    plain_mlp = replace(c.mlp, kind="cem", learn_step_size=False)
    for changes in (
        dict(attention=one_p, step_norm="none"),
        dict(attention=no_p, step_norm="weightless", norm_gradient="at_u"),
        dict(attention=no_p, step_norm="shared", norm_gradient="scaled"),
    ):
        special = _with_model(case, replace(c, **changes))
        yield _fact(special, "attention")[1]
    special = _with_model(case, replace(c, mlp=plain_mlp, step_norm="none"))
    x_BJD = _starts(special)
    with precision("float64"):
        p = parameters_in(special.layer("mlp"), "float64")
        eta = 0.9 * _mlp_bound(special.model, p, x_BJD)
    model = replace(special.model, mlp=replace(plain_mlp, step_size=eta))
    yield _fact(replace(special, model=model), "mlp")[1]


def _with_model(case: Case, model: ModelConfig) -> Case:
    return make_case(case.title, model, case.positions, case.seed, ("float64",))


def _starts(case: Case) -> np.ndarray:
    rng = np.random.default_rng(case.seed)
    return rng.standard_normal((_SEQUENCES, case.positions, case.model.dim))


def _fact(case: Case, name: str) -> tuple[Fact, Row | None]:
    """Run the sublayer's own updates from random states and compare energies step by step."""
    c, x_BJD = case.model, _starts(case)
    premises = {"attention": _attention_premises, "mlp": _mlp_premises}[name]
    with precision("float64"):
        p = parameters_in(case.layer(name), "float64")
        run = jit(lambda p, x: _trajectory(c, name, p, x))
        energy_NBJ, gradient_NBJD = to_numpy(run(p, jnp.asarray(x_BJD)))
        missing, claim = premises(c, p, x_BJD)
    rise_NBJ = np.diff(energy_NBJ, axis=0)
    scale = np.abs(energy_NBJ).max()
    # the rounding of an energy, a sum over D and J or M terms; and the norm's eps, by which the
    # length of u can grow with that of x, up to eps/2
    tolerance = 256 * eps("float64") + (c.norm_eps if c.step_norm != "none" else 0.0)
    rising = float((rise_NBJ > tolerance * scale).mean())
    fact = Fact(name, not missing, "; ".join(missing) or claim, rising, rise_NBJ.size)
    if missing:
        return fact, None
    excess_NBJ = rise_NBJ
    if name == "attention" and c.step_norm == "none":
        excess_NBJ = rise_NBJ + _promised_drop(c, p, gradient_NBJD)
    error = float(np.nan_to_num(excess_NBJ, nan=np.inf).max(initial=0.0) / scale)
    shape = case.layer_shape(name, _STEPS)
    return fact, Row(f"descent, {claim}", shape, "float64", error, tolerance)


def _trajectory(c: ModelConfig, name: str, p, x_BJD):
    """Return the energies [N+1, B, J] at every state, and their gradients [N, B, J, D]."""
    layer = sublayer(c, name, p)
    h_BJD = layer.context(x_BJD)
    start = x_BJD if c.residual == "prenorm" else h_BJD

    def total(state):
        energy_BJ = layer.energy(state, h_BJD)
        return energy_BJ.sum(), energy_BJ

    def step(state, _):
        (_, energy_BJ), gradient_BJD = jax.value_and_grad(total, has_aux=True)(state)
        return state + layer.update(state, h_BJD), (energy_BJ, gradient_BJD)

    end, (energy_NBJ, gradient_NBJD) = jax.lax.scan(step, start, length=_STEPS)
    return jnp.concatenate([energy_NBJ, layer.energy(end, h_BJD)[None]]), gradient_NBJD


def _promised_drop(c: ModelConfig, p, gradient_NBJD: np.ndarray) -> np.ndarray:
    """Return η gᵀPg, [N, B, J]."""
    eta = float(p.get("eta", c.attention.step_size))
    preconditioned = gradient_NBJD
    if "preconditioner" in p:
        with precision("float64"):
            preconditioned = gradient_NBJD @ _matrix(p["preconditioner"], c)
    return eta * (gradient_NBJD * preconditioned).sum(-1)


def _attention_premises(c: ModelConfig, p, x_BJD) -> tuple[list[str], str]:
    a, missing = c.attention, []
    if a.diagonal != "none" and not a.diagonal_in_update:
        missing.append("the update leaves out the diagonal's gradient (diagonal_in_update=False)")
    if float(p.get("eta", a.step_size)) <= 0:
        missing.append("the step size is not positive")
    if c.step_norm == "none":
        if a.preconditioner != "none" and a.preconditioner_heads != "shared" and a.heads > 1:
            missing.append("each head has its own P (preconditioner_heads=per_head)")
        elif _smallest_eigenvalue(p, c) <= 0:
            missing.append("P is not positive definite")
        return missing, "no norm, one P: ε(x+ηF) ≤ ε(x) − η gᵀPg"
    if a.preconditioner != "none":
        missing.append(f"P is not a multiple of I under a norm (preconditioner={a.preconditioner})")
    scaled = c.norm_gradient == "scaled"
    if not (scaled or (c.step_norm == "weightless" and c.norm_gradient == "at_u")):
        missing.append(f"step_norm={c.step_norm} with norm_gradient={c.norm_gradient}")
    return missing, f"{c.step_norm} norm, {c.norm_gradient}: ε never rises"


def _mlp_premises(c: ModelConfig, p, x_BJD) -> tuple[list[str], str]:
    if c.step_norm != "none":
        return [f"there is a norm (step_norm={c.step_norm})"], ""
    if _smallest_eigenvalue(p, c) <= 0:
        return ["P is not positive definite"], ""
    bound = _mlp_bound(c, p, x_BJD)
    eta = float(p.get("eta", c.mlp.step_size))
    if not 0 < eta < bound:
        return [f"the step size {eta:.3g} is not in (0, {bound:.3g})"], ""
    return [], "no norm, η below the bound: ξ never rises"


def _mlp_bound(c: ModelConfig, p, x_BJD) -> float:
    """Return the η below which ξ provably falls."""
    h_BJD = plain.norm(x_BJD.reshape(-1, c.dim), p["norm"], c.norm_eps)
    gamma = float(jnp.abs(h_BJD @ p["multiplier"].T).max())
    tied = float(jnp.linalg.norm(p["tied"], 2))
    factors = p.get("preconditioner")
    p_norm = 1.0 if factors is None else float(np.linalg.norm(_matrix(factors, c), 2))
    return 2.0 / (activation(c.mlp.activation).slope * gamma * tied**2 * p_norm)


def _smallest_eigenvalue(p, c: ModelConfig) -> float:
    factors = p.get("preconditioner")
    return 1.0 if factors is None else float(np.linalg.eigvalsh(_matrix(factors, c))[0])


def _matrix(factors, c: ModelConfig) -> np.ndarray:
    """Return the matrix of the single P, which may be a single head's own."""
    factors = {
        name: leaf[0] if leaf.ndim > (1 if name == "p" else 2) else leaf
        for name, leaf in factors.items()
    }
    return np.asarray(plain.preconditioner(factors, c.dim))

"""Energies and forces of the CEM sublayers at one state, computed in every available way.

Shapes: J positions · D model dim · N directions.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cem_jax.config import ModelConfig
from cem_jax.energy import (
    elementwise_force,
    interaction_energy,
    interaction_force,
    preconditioner_matrix,
)
from cem_jax.energy.activation import activation
from cem_jax.energy.interaction import energy_of_query, queries_of
from cem_jax.kernels import FUSED_PLATFORMS, Options, target_platform
from cem_jax.verify import plain
from cem_jax.verify.case import Case, sublayer
from cem_jax.verify.rows import (
    SAFETY,
    Row,
    compare,
    eps,
    in_dtype,
    jit,
    parameters_in,
    precision,
    reference,
    relative_error,
    to_numpy,
)

# Maximum number of entries of an explicit P for all heads, half a GiB in float64. Beyond it, only
# `plain` is explicit: it builds P for one head at a time.
_EXPLICIT_LIMIT = 2**26

_UPDATES = ("autodiff", "closed_form")
_DIRECTIONS = 4
# Five-point differences with steps of 3e-3 along directions of ±1. Errors: 1e-11 from the fifth
# derivative, 1e-11 from rounding, and 1e-8 from φ of SiLU: its two branches differ by 7e-11 where
# they meet, and some of the thousands of hidden units cross within a step.
_DIFFERENCE_STEP, _DIFFERENCE_TOLERANCE = 3e-3, 1e-7
# ReLU's σ has a kink: steps small enough that hardly any unit crosses it, at the cost of rounding.
_KINK_STEP, _KINK_TOLERANCE = 1e-6, 1e-6


def implementations() -> tuple[str, ...]:
    """Return the attention implementations of this machine; "auto" if that is a fused kernel."""
    fused = ("auto",) if target_platform() in FUSED_PLATFORMS else ()
    return ("dense", "blockwise", *fused)


def attention_rows(case: Case) -> Iterator[Row]:
    """Yield the rows of a CEM attention layer."""
    c, shape = case.model, case.layer_shape("attention")
    x, context = case.states(2)
    p = case.layer("attention")
    segments = case.segments_J
    wanted = reference(
        lambda p, x, h: _plain_attention(p, x[0], h[0], segments, c),
        p, x, context, dtypes=case.dtypes,
    )  # fmt: skip
    for dtype in case.dtypes:
        found = _in(dtype, lambda p, x, h: _attention_results(c, p, x, h, segments), p, x, context)
        for name in implementations():
            yield compare(
                f"attention energy, {name}", shape, dtype, found[f"energy {name}"],
                wanted.part("energy"),
            )  # fmt: skip
        for update in _UPDATES:
            for name in implementations():
                yield compare(
                    f"attention force, {update.replace('_', ' ')}, {name}", shape, dtype,
                    found[f"{update} {name}"], wanted.part("force"),
                )  # fmt: skip
        yield compare(
            "attention step x + ηF, through the norm", shape, dtype, found["step"],
            wanted.part("step"),
        )  # fmt: skip
        if "explicit P" in found:
            explicit = wanted.part("force")._replace(value=found["explicit P"])
            folded = found[f"{c.attention.update} dense"]
            check = "attention force, folded P = explicit P"
            yield compare(check, shape, dtype, folded, explicit)
    with precision("float64"):
        yield from _attention_differences(case, p, x, context)


def mlp_rows(case: Case) -> Iterator[Row]:
    """Yield the rows of a CEM MLP layer."""
    c, shape = case.model, case.layer_shape("mlp")
    x, context = case.states(2)
    p = case.layer("mlp")
    wanted = reference(
        lambda p, x, h: _plain_mlp(p, x[0], h[0], c), p, x, context, dtypes=case.dtypes
    )
    for dtype in case.dtypes:
        found = _in(dtype, lambda p, x, h: _mlp_results(c, p, x, h), p, x, context)
        yield compare(
            "MLP energy", shape, dtype, found["energy"], wanted.part("energy"),
            slack=_phi_slack(case, p, context, wanted.value["energy"]),
        )  # fmt: skip
        for update in _UPDATES:
            yield compare(
                f"MLP force, {update.replace('_', ' ')}", shape, dtype, found[update],
                wanted.part("force"),
            )  # fmt: skip
        yield compare(
            "MLP step x + ηF, through the norm", shape, dtype, found["step"],
            wanted.part("step"),
        )  # fmt: skip
        if "explicit P" in found:
            explicit = wanted.part("force")._replace(value=found["explicit P"])
            folded = found[c.mlp.update]
            yield compare("MLP force, folded P = explicit P", shape, dtype, folded, explicit)
    with precision("float64"):
        yield _mlp_differences(case, p, x, context)


def explicit_matrix(factors: Any, dim: int) -> jax.Array:
    """Return the matrix P of a layer's parameters, as `preconditioner_matrix` computes it."""
    argument = factors["p"] * np.sqrt(dim).astype(factors["p"].dtype)
    return preconditioner_matrix(argument, factors.get("left"), factors.get("right"))


def _in(dtype: str, function: Callable, p: Any, *states: np.ndarray) -> Any:
    """Return `function(parameters, *states)` computed in `dtype`."""
    with precision(dtype):
        found = jit(function)(parameters_in(p, dtype), *in_dtype(states, dtype))
        return to_numpy(found)


def _rows_of(segments_J):
    return None if segments_J is None else segments_J[None]


def attention_frame(c: ModelConfig, p: Any, h: jax.Array, segments_J) -> tuple[Any, Any]:
    """Return a CEM attention layer and its frame."""
    layer = sublayer(c, "attention", p)
    return layer, layer.frame(h, _rows_of(segments_J))


def functional_arguments(c: ModelConfig, p: Any, u: jax.Array, segments_J) -> dict[str, Any]:
    """Return that layer's keyword arguments of `interaction_energy` and `interaction_force`."""
    a = c.attention
    return dict(
        tau=c.tau,
        # in the state's dtype, in which layers compute; the functions promote their arguments
        diagonal=p["diagonal"].astype(u.dtype) if "diagonal" in p else None,
        slopes=plain.slopes(a.alibi_slopes, a.heads) if a.position == "alibi" else None,
        self_bias=p.get("self_bias"),
        rotary=(np.arange(u.shape[-2]), a.rope_base) if a.position == "rope" else None,
        segments=_rows_of(segments_J),
    )


def _plain_attention(p, x_JD, h_JD, segments_J, c: ModelConfig) -> dict[str, jax.Array]:
    return {
        "energy": plain.interaction_energy(x_JD, h_JD, p, segments_J, c)[None],
        "force": plain.interaction_force(x_JD, h_JD, p, segments_J, c)[None],
        "step": plain.attention_step(x_JD, h_JD, p, segments_J, c)[None],
    }


def _attention_results(c: ModelConfig, p, u, h, segments_J) -> dict[str, jax.Array]:
    """Return the layer's energy, force and step, and `interaction_force` with an explicit P."""
    found = {}
    for name in implementations():
        for update in _UPDATES:
            blocks = None if name == "auto" else c.attention.block_sizes
            attention = replace(c.attention, implementation=name, update=update, block_sizes=blocks)
            layer, frame = attention_frame(replace(c, attention=attention), p, h, segments_J)
            found[f"{update} {name}"] = layer.force(u, frame)
        found[f"energy {name}"] = layer.energy_at(u, frame)
    layer, _ = attention_frame(c, p, h, segments_J)
    found["step"] = u + layer.update(u, h, segments=_rows_of(segments_J))
    if "preconditioner" in p and c.attention.heads * c.dim**2 <= _EXPLICIT_LIMIT:
        matrix = explicit_matrix(p["preconditioner"], c.dim)
        if matrix.ndim == 2:
            matrix = jnp.stack([matrix] * c.attention.heads)
        found["explicit P"] = interaction_force(
            u,
            h,
            p["query"].astype(u.dtype),
            p["key"].astype(u.dtype),
            diagonal_in_update=c.attention.diagonal_in_update,
            preconditioner=matrix,
            **functional_arguments(c, p, u, segments_J),
        )
    return found


def _plain_mlp(p, x_JD, h_JD, c: ModelConfig) -> dict[str, Any]:
    return {
        "energy": plain.elementwise_energy(x_JD, h_JD, p, c)[None],
        "force": plain.elementwise_force(x_JD, h_JD, p, c)[None],
        "step": plain.mlp_step(x_JD, h_JD, p, c)[None],
    }


def _mlp_results(c: ModelConfig, p, u, h) -> dict[str, jax.Array]:
    """Return the layer's energy, force and step, and `elementwise_force` with an explicit P."""
    found = {}
    for update in _UPDATES:
        layer = sublayer(replace(c, mlp=replace(c.mlp, update=update)), "mlp", p)
        frame = layer.frame(h)
        found[update] = layer.force(u, frame)
    found["energy"] = layer.energy_at(u, frame)
    found["step"] = u + sublayer(c, "mlp", p).update(u, h)
    if "preconditioner" in p:
        found["explicit P"] = elementwise_force(
            u,
            frame.gamma,
            p["tied"].astype(u.dtype),
            activation=c.mlp.activation,
            preconditioner=explicit_matrix(p["preconditioner"], c.dim).astype(u.dtype),
        )
    return found


def _phi_slack(case: Case, p, context, energy: np.ndarray) -> float:
    """Return what the error of φ's formula may add to the energy, relative to the largest one."""
    gamma_JM = np.abs(context[0] @ p["multiplier"].T)
    error = activation(case.model.mlp.activation).phi_error
    return float(error * gamma_JM.sum(-1).max() / np.abs(energy).max())


def _attention_differences(case: Case, p, x, context) -> Iterator[Row]:
    """Compare −∂ε/∂u with central differences of ε; h, and in Algorithm 1 also d∘u, are held."""
    c, shape = case.model, case.layer_shape("attention")
    p, u, h = in_dtype((p, x, context), "float64")

    def energy(u, p, h):
        arguments = functional_arguments(c, p, u, case.segments_J)
        return interaction_energy(u, h, p["query"], p["key"], **arguments)

    def force(u, p, h, exact: bool):
        arguments = functional_arguments(c, p, u, case.segments_J)
        return interaction_force(u, h, p["query"], p["key"], diagonal_in_update=exact, **arguments)

    @jit
    def results(u, p, h):
        autodiff = -jax.grad(lambda u: energy(u, p, h).sum())(u)
        return autodiff, force(u, p, h, exact=True), force(u, p, h, exact=False)

    autodiff, exact, algorithm_1 = results(u, p, h)
    check = "attention −∂ε/∂u, autodiff = closed form"
    yield Row(check, shape, "float64", relative_error(autodiff, exact), _rounding(case))
    check = "attention −∂ε/∂u, central differences"
    yield difference_row(check, shape, energy, u, (p, h), exact, case)
    if "diagonal" in p and not c.attention.diagonal_in_update:
        check = "attention −∂ε/∂u, d∘u held, central differences"
        held_energy = lambda moved, p, h, u: _held_energy(case, moved, p, h, u)
        yield difference_row(check, shape, held_energy, u, (p, h, u), algorithm_1, case)


def _held_energy(case: Case, moved, p, h, u) -> jax.Array:
    """Return ε at `moved`, with the diagonal's d∘u held at `u`."""
    _, frame = attention_frame(case.model, p, h, case.segments_J)
    held = queries_of(u, frame.weights)
    moving = held._replace(q=queries_of(moved, frame.weights).q)
    return energy_of_query(moving, frame.keys, Options(case.model.tau, implementation="dense"))


def _mlp_differences(case: Case, p, x, context) -> Row:
    c = case.model
    p, u, h = in_dtype((p, x, context), "float64")

    def energy(u, p, h):
        layer = sublayer(c, "mlp", p)
        return layer.energy_at(u, layer.frame(h))

    gamma = h @ p["multiplier"].T
    force = jit(lambda *args: elementwise_force(*args, activation=c.mlp.activation))
    check = "MLP −∂ξ/∂u, central differences"
    kink = not activation(c.mlp.activation).smooth
    wanted = force(u, gamma, p["tied"])
    shape = case.layer_shape("mlp")
    return difference_row(check, shape, energy, u, (p, h), wanted, case, kink=kink)


def difference_row(
    check: str,
    shape: str,
    energy: Callable,
    u: jax.Array,
    held: tuple,
    force: jax.Array,
    case: Case,
    *,
    kink: bool = False,
) -> Row:
    """Compare `force` with five-point differences of −energy(u, *held) along random directions.

    A position's energy depends only on its own u, so all positions move at once.
    """
    step, tolerance = (
        (_KINK_STEP, _KINK_TOLERANCE) if kink else (_DIFFERENCE_STEP, _DIFFERENCE_TOLERANCE)
    )
    rng = np.random.default_rng(case.seed)
    directions = rng.integers(0, 2, (_DIRECTIONS, *u.shape)) * 2.0 - 1.0
    offsets = step * np.array([-2.0, -1.0, 1.0, 2.0]).reshape(4, 1, 1, 1, 1) * directions[None]
    points = (np.asarray(u)[None, None] + offsets).reshape(-1, *u.shape)
    energies = jit(lambda points, *held: jax.vmap(lambda u: energy(u, *held))(points))
    e = np.asarray(energies(jnp.asarray(points), *held)).reshape(4, _DIRECTIONS, *u.shape[:-1])
    slope = (e[0] - 8.0 * e[1] + 8.0 * e[2] - e[3]) / (12.0 * step)
    along = (np.asarray(force)[None] * directions).sum(-1)
    return Row(check, shape, "float64", relative_error(-slope, along), tolerance)


def _rounding(case: Case) -> float:
    """Return the tolerance between two float64 computations of well-conditioned sums over D, J."""
    return SAFETY["float64"] * eps("float64") * float(np.sqrt(case.model.dim * case.positions))

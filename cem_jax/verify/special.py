"""Special cases: CEM's T=1 as a tied Llama block, the rotary gradient, φ and σ, ALiBi slopes.

Shapes: J positions · D model dim · K heads · R head dim.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np

from cem_jax.energy import (
    Rotary,
    alibi_slopes,
    antiderivative,
    interaction_energy,
    interaction_force,
)
from cem_jax.energy.activation import activation
from cem_jax.verify import plain
from cem_jax.verify.case import Case, sublayer
from cem_jax.verify.forces import difference_row
from cem_jax.verify.rows import (
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

# φ of SiLU is a series with an error of up to 4e-11 in float64 (see its docstring); float32 rounds
# x²/2, cosh-like sums and a logarithm: a few eps.
_PHI_TOLERANCE = {"float64": 1e-10, "float32": 1e-6}
_SIGMA_ROUNDINGS = 16


def llama_rows(case: Case) -> Iterator[Row]:
    """Check that CEM with T=1, η=1, P=I and no diagonal equals the tied baseline sublayer."""
    c = case.model
    position = "none" if c.attention.position == "rope" else c.attention.position
    attention = replace(
        c.attention, steps=1, step_size=1.0, learn_step_size=False, diagonal="none",
        diagonal_in_update=False, position=position, preconditioner="none",
    )  # fmt: skip
    mlp = replace(c.mlp, steps=1, step_size=1.0, learn_step_size=False, preconditioner="none")
    special = replace(
        c, residual="prenorm", step_norm="shared", norm_gradient="at_u", attention=attention,
        mlp=mlp,
    )  # fmt: skip
    if c.attention.kind == "cem":
        p = _only(case.layer("attention"), "norm", "query", "key", "self_bias")
        tied = {**p, "output": p["query"], "value": p["key"]}
        twin = replace(special, attention=replace(attention, kind="llama"))
        yield from _twin_rows("attention", case, special, p, twin, tied)
    if c.mlp.kind == "cem":
        p = _only(case.layer("mlp"), "norm", "multiplier", "tied")
        tied = {"norm": p["norm"], "up": p["multiplier"], "gate": p["tied"], "down": p["tied"]}
        twin = replace(special, mlp=replace(mlp, kind="gated"))
        yield from _twin_rows("mlp", case, special, p, twin, tied)


def rotary_rows(case: Case) -> Iterator[Row]:
    """Check that the force with rotary positions is exactly −∂ε/∂u."""
    rng = np.random.default_rng(case.seed)
    positions, heads, width, dim = 11, 3, 6, 10
    draw = lambda *shape: rng.standard_normal(shape) / math.sqrt(shape[-1])
    with precision("float64"):
        u, h = in_dtype((draw(1, positions, dim) * 3.0, draw(1, positions, dim) * 3.0), "float64")
        weights = in_dtype((draw(heads, width, dim), draw(heads, width, dim)), "float64")
        scores = dict(tau=math.sqrt(width), rotary=Rotary(np.arange(positions), 100.0))
        energy = lambda u, h, *weights: interaction_energy(u, h, *weights, **scores)

        @jit
        def both(u, *held):
            force = interaction_force(u, *held, **scores)
            return force, -jax.grad(lambda u: energy(u, *held).sum())(u)

        force, gradient = both(u, h, *weights)
        shape = f"J{positions} D{dim} K{heads} R{width}"
        check = "rotary: exact gradient, central differences"
        yield difference_row(check, shape, energy, u, (h, *weights), force, case)
        tolerance = 64 * eps("float64")  # two ways through about ten sums of ten terms each
        yield Row(
            "rotary: exact gradient, autodiff", shape, "float64", relative_error(force, gradient),
            tolerance,
        )  # fmt: skip


def activation_rows(name: str) -> Iterator[Row]:
    """Check σ and its slope, φ' = σ by autodiff and differences, and φ = ∫σ by quadrature."""
    x = np.concatenate([np.linspace(-20.0, 20.0, 401), [0.0, 1e-3, -1e-3]])
    with precision("float64"):
        sigma = np.asarray(plain.sigma(name)(x))
        phi = plain.antiderivative(name, x)
    scale = 1.0 + np.abs(x)
    phi_of, sigma_of = antiderivative(name), activation(name).sigma
    functions = jit(lambda x: (phi_of(x), sigma_of(x), jax.vmap(jax.grad(phi_of))(x)))
    for dtype in ("float64", "float32"):
        with precision(dtype):
            found_phi, *found_sigmas = to_numpy(functions(in_dtype(x, dtype)))
        for check, found in zip(("σ", "φ' = σ, autodiff"), found_sigmas, strict=True):
            error = _largest(found - sigma, scale)
            yield Row(f"{name}: {check}", "404", dtype, error, _SIGMA_ROUNDINGS * eps(dtype))
        error = _largest(found_phi - phi, 1.0 + np.abs(phi))
        yield Row(f"{name}: φ = ∫σ, quadrature", "404", dtype, error, _PHI_TOLERANCE[dtype])
    with precision("float64"):
        step = 1e-3
        # not near 0, where the branches of φ differ by 7e-11 and ReLU has its kink
        clear = np.abs(x) > 2.0 * step
        of = lambda offset: np.asarray(jit(phi_of)(in_dtype(x + offset, "float64")))
        slope = 8.0 * (of(step) - of(-step)) - (of(2.0 * step) - of(-2.0 * step))
        error = _largest((slope / (12.0 * step) - sigma)[clear], scale[clear])
        # 1e-13 from the fourth power of the step; and the rounding of φ ≤ 200, over the step
        tolerance = 8.0 * 200.0 * eps("float64") / step
        check = f"{name}: φ' = σ, central differences"
        yield Row(check, "401", "float64", error, tolerance)
        points = np.linspace(-20.0, 20.0, 40_001)
        chords = np.diff(np.asarray(plain.sigma(name)(points))) / np.diff(points)
        # between two points the largest slope is at least the chord's; the bound is only rounded up
        share = np.abs(chords).max() / activation(name).slope - 1.0
        check = f"{name}: |σ'| at most {activation(name).slope}"
        yield Row(check, "40001", "float64", max(share, -share - 1e-4, 0.0), 64.0 * eps("float64"))


def slope_rows(case: Case) -> Iterator[Row]:
    """Check ALiBi's slopes for the model's scheme and number of heads, if it has them."""
    a = case.model.attention
    if a.position != "alibi":
        return
    error = relative_error(
        alibi_slopes(a.heads, a.alibi_slopes), plain.slopes(a.alibi_slopes, a.heads)
    )
    yield Row(f"ALiBi slopes, {a.alibi_slopes}", f"K{a.heads}", "float32", error, eps("float32"))


def _twin_rows(name, case: Case, special, p, twin, tied) -> Iterator[Row]:
    x = case.states(1)[0]
    at_once = {"attention": lambda p, x: plain.attention(x, p, None, twin),
               "mlp": lambda p, x: plain.mlp(x, p, twin)}[name]  # fmt: skip
    wanted = reference(lambda p, x: at_once(p, x[0])[None], tied, x, dtypes=case.dtypes)
    both = jit(lambda p, tied, x: (sublayer(special, name, p)(x), sublayer(twin, name, tied)(x)))
    label = {"attention": "attention", "mlp": "MLP"}[name]
    shape = case.layer_shape(name, steps=1)
    for dtype in case.dtypes:
        with precision(dtype):
            found = both(parameters_in(p, dtype), parameters_in(tied, dtype), in_dtype(x, dtype))
            for model, output in zip(("CEM", "Llama"), found, strict=True):
                check = f"T=1 {label} = tied Llama, {model} layer"
                yield compare(check, shape, dtype, output, wanted)


def _only(parameters, *names):
    return {name: parameters[name] for name in names if name in parameters}


def _largest(difference: np.ndarray, scale: np.ndarray) -> float:
    return float(np.nan_to_num(np.abs(difference) / scale, nan=np.inf).max())

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from energy_oracle import gradient, interaction, random_layer

from cem_jax.energy import (
    Preconditioner,
    Rotary,
    interaction_energy,
    interaction_force,
    preconditioner_matrix,
)
from cem_jax.energy.interaction import folded_weights, force_on_state, keys_of
from cem_jax.kernels import Options, Scores

TAU = 1.9
ROTARY = (np.array([0, 1, 2, 7, 8]), 50.0)
SEGMENTS = np.array([0, 0, 1, 0, 1])
CASES = {
    "plain": {},
    "shared diagonal": dict(diagonal="shared"),
    "diagonal a head": dict(diagonal="per_head"),
    "rotary": dict(rotary=ROTARY),
    "everything": dict(diagonal="shared", rotary=ROTARY, segments=SEGMENTS),
    "everything a head": dict(diagonal="per_head", rotary=ROTARY, segments=SEGMENTS),
}


def layer_of(name: str, seed=0, **sizes) -> tuple[dict, dict]:
    """Return the arrays to differentiate with respect to, and the other arguments."""
    fixed = dict(CASES[name])
    arrays = random_layer(
        np.random.default_rng(seed), diagonal=fixed.pop("diagonal", "none"), **sizes
    )
    return arrays, dict(fixed, tau=TAU)


@pytest.mark.parametrize("name", CASES)
def test_energy_is_the_double_sum_and_the_force_its_gradient(x64, name):
    arrays, fixed = layer_of(name)
    expected = interaction(**arrays, **fixed)
    without_u = {n: x for n, x in arrays.items() if n != "u"}
    by_differences = -gradient(lambda u: interaction(u, **without_u, **fixed).sum(), arrays["u"])
    for implementation in ("dense", "blockwise"):
        how = dict(fixed, implementation=implementation)

        @jax.jit
        def all_of_it(u, how=how):
            energy = lambda u: interaction_energy(u, **without_u, **how)
            force = interaction_force(u, **without_u, **how, diagonal_in_update=True)
            return energy(u), force, -jax.grad(lambda u: energy(u).sum())(u)

        energy, force, minus_gradient = all_of_it(arrays["u"])
        np.testing.assert_allclose(energy, expected, rtol=1e-11)
        np.testing.assert_allclose(force, minus_gradient, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(force, by_differences, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["shared diagonal", "everything a head"])
def test_algorithm_1_leaves_out_the_diagonals_own_gradient(x64, name):
    """Its force is the gradient of an energy whose g is held."""
    arrays, fixed = layer_of(name)
    plain = {n: x for n, x in arrays.items() if n != "diagonal"}
    force = interaction_force(**arrays, **fixed)
    exact = interaction_force(**arrays, **fixed, diagonal_in_update=True)
    assert not np.allclose(force, exact)
    # the same by differences: move u only in q = W^Q u, with g held
    u, query = arrays["u"], arrays["query"]
    wide = dict(
        plain,
        query=np.concatenate([query, np.zeros_like(query)], -1),
        key=np.concatenate([arrays["key"], np.zeros_like(query)], -1),
        diagonal=np.concatenate([np.zeros_like(arrays["diagonal"]), arrays["diagonal"]], -1),
        h=np.concatenate([arrays["h"], arrays["h"]], -1),
    )
    del wide["u"]
    moved = lambda v: interaction(np.concatenate([v, u], -1), **wide, **fixed).sum()
    np.testing.assert_allclose(force, -gradient(moved, u), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("leading", [(2,), (2, 1)])
def test_leading_axes_and_array_likes(x64, leading):
    arrays, fixed = layer_of("everything", leading=leading)
    fixed["segments"] = np.broadcast_to(SEGMENTS, (*leading, 5))
    energy = interaction_energy(**arrays, **fixed)
    force = interaction_force(**arrays, **fixed)
    assert (energy.shape, force.shape) == ((*leading, 5), (*leading, 5, 6))
    for at in np.ndindex(leading):
        one = dict(arrays, u=arrays["u"][at], h=arrays["h"][at])
        fixed_one = dict(fixed, segments=SEGMENTS)
        np.testing.assert_allclose(energy[at], interaction(**one, **fixed_one), rtol=1e-11)
    lists = {n: x.tolist() for n, x in arrays.items()}
    np.testing.assert_array_equal(interaction_energy(**lists, **fixed), energy)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 6, 2, 3), (4, 1, 3, 2), (3, 5, 1, 7)])
def test_every_size_is_legal(x64, shape):
    positions, dim, heads, width = shape
    sizes = dict(positions=positions, dim=dim, heads=heads, width=width)
    arrays = random_layer(np.random.default_rng(1), diagonal="per_head", **sizes)
    np.testing.assert_allclose(
        interaction_energy(**arrays, tau=TAU), interaction(**arrays, tau=TAU), rtol=1e-11
    )


def test_any_preconditioner_is_applied_from_the_left(x64):
    """The result is P_k f_k even if a caller's P is not symmetric."""
    arrays, fixed = layer_of("diagonal a head")
    p_KDD = np.random.default_rng(2).normal(size=(2, 6, 6))
    by_head = 0
    for k in range(2):
        alone = {n: arrays[n][k : k + 1] for n in ("query", "key", "slopes", "self_bias")}
        alone = dict(arrays, **alone, diagonal=arrays["diagonal"][k : k + 1])
        force = interaction_force(**alone, **fixed, diagonal_in_update=True)
        by_head += np.einsum("de,je->jd", p_KDD[k], force)
    np.testing.assert_allclose(
        interaction_force(**arrays, **fixed, diagonal_in_update=True, preconditioner=p_KDD),
        by_head,
        rtol=1e-10,
    )


# What a layer calls: query coordinates, P folded into W^Q.


def layer_force(arrays: dict, p: Preconditioner | None, fixed: dict, *, exact, update, **how):
    rotary = Rotary(*fixed["rotary"]) if "rotary" in fixed else None
    scores = Scores(arrays["slopes"], arrays["self_bias"], fixed.get("segments"))
    diagonal = "diagonal" in arrays
    keys = keys_of(arrays["h"], arrays["key"], diagonal=diagonal, scores=scores, rotary=rotary)
    weights = folded_weights(arrays["query"], arrays.get("diagonal"), p)
    options = Options(fixed["tau"], **how)
    return force_on_state(
        arrays["u"], keys, weights, options, diagonal_in_update=exact, update=update
    )


DENSE, BLOCKWISE = (
    dict(implementation="dense"),
    dict(implementation="blockwise", block_sizes=(2, 3)),
)
AUTODIFF, CLOSED = dict(update="autodiff"), dict(update="closed_form")
# Kind of diagonal, whether its gradient counts, whether there is one P per head; and ways to
# compute the force: every path through it at least once by autodiff and once in closed form.
LAYERS = {
    "plain": ("plain", False, True, [CLOSED | DENSE]),
    "algorithm 1": ("shared diagonal", False, True, [AUTODIFF | DENSE, AUTODIFF | BLOCKWISE]),
    "exact, shared P": ("everything", True, False, [AUTODIFF | BLOCKWISE, CLOSED | DENSE]),
    "exact, P a head": ("everything", True, True, [AUTODIFF | DENSE]),
    "exact, all a head": ("everything a head", True, True, [AUTODIFF | BLOCKWISE]),
    "exact, d a head": ("everything a head", True, False, [CLOSED | BLOCKWISE]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_force_and_its_training_gradient(x64, name):
    """Compare folded P, autodiff, closed form and blockwise with explicit P and plain autodiff."""
    kind, exact, per_head, ways = LAYERS[name]
    arrays, fixed = layer_of(kind, leading=(1,))
    if "segments" in fixed:
        fixed["segments"] = SEGMENTS[None]
    rng = np.random.default_rng(3)
    lead = (2,) if per_head else ()
    p = Preconditioner(*(rng.normal(size=(*lead, *s)) for s in ((6,), (6, 2), (6, 2))))
    bar = rng.normal(size=arrays["u"].shape)

    def by_layer(arrays, p, how):
        return layer_force(arrays, p, fixed, exact=exact, **how)

    def by_definition(arrays, p, _):
        matrix = jnp.broadcast_to(preconditioner_matrix(*p), (2, 6, 6))
        return interaction_force(**arrays, **fixed, diagonal_in_update=exact, preconditioner=matrix)

    def results(function, how):
        loss = lambda arrays, p: (bar * jnp.sin(function(arrays, p, how))).sum()
        both = lambda arrays, p: (
            function(arrays, p, how),
            jax.grad(loss, argnums=(0, 1))(arrays, p),
        )
        quickly = {"xla_backend_optimization_level": 0}  # most of the time is compilation
        return jax.jit(both).lower(arrays, p).compile(compiler_options=quickly)(arrays, p)

    expected = results(by_definition, {})
    assert "diagonal" not in arrays or np.abs(expected[1][0]["diagonal"]).max() > 0.01
    for how in ways:
        jax.tree.map(
            lambda a, b, how=how: np.testing.assert_allclose(
                a, b, rtol=1e-9, atol=1e-11, err_msg=str(how)
            ),
            results(by_layer, how),
            expected,
        )


def test_a_position_depends_only_on_its_past_and_document():
    arrays, fixed = layer_of("everything")
    how = dict(fixed, implementation="blockwise", diagonal_in_update=True)
    force = lambda u, h: interaction_force(**dict(arrays, u=u, h=h), **how)
    by_u, by_h = jax.jit(jax.jacrev(force, argnums=(0, 1)))(arrays["u"], arrays["h"])
    i, j = np.indices((5, 5))
    visible = (j <= i) & (SEGMENTS[i] == SEGMENTS[j])
    assert (np.abs(by_u).sum((1, 3))[i != j] == 0).all()
    influence = np.abs(by_h).sum((1, 3))
    assert (influence[~visible] == 0).all() and (influence[visible] > 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes(dtype):
    arrays, fixed = layer_of("everything")
    low = {n: jnp.asarray(x, dtype) for n, x in arrays.items()}
    wide = {n: x.astype(jnp.float32) for n, x in low.items()}
    eps = float(jnp.finfo(dtype).eps)
    energy_of = jax.jit(lambda t: interaction_energy(**t, **fixed))
    energy, exact = energy_of(low), energy_of(wide)
    assert energy.dtype == jnp.float32
    # q and k are rounded by half a unit each; the scores sum a dozen products of size one
    np.testing.assert_allclose(energy, exact, atol=16 * eps, rtol=4 * eps)
    how = dict(fixed, diagonal_in_update=True)
    expected = jax.jit(lambda t: interaction_force(**t, **how))(wide)
    for implementation in ("dense", "blockwise"):
        force = jax.jit(
            lambda t, name=implementation: interaction_force(**t, **how, implementation=name)
        )(low)
        assert force.dtype == low["u"].dtype
        np.testing.assert_allclose(force.astype(jnp.float32), expected, atol=32 * eps)


def test_tau_of_any_float_type_leaves_dtypes_alone(x64):
    arrays, _ = layer_of("shared diagonal")
    single = {n: x.astype(np.float32) for n, x in arrays.items()}
    assert interaction_energy(**single, tau=np.sqrt(4.0)).dtype == jnp.float32
    assert interaction_force(**single, tau=np.sqrt(4.0)).dtype == jnp.float32


@pytest.mark.parametrize(
    "change",
    [
        dict(u=(4, 6)),
        dict(h=(2, 5, 6)),
        dict(query=(2, 3, 6)),
        dict(query=(2, 4, 5), key=(2, 4, 5)),
        dict(query=(4, 6)),
        dict(diagonal=(1,)),
        dict(diagonal=(2, 1)),
        dict(diagonal=(3, 6)),
        dict(slopes=(3,)),
        dict(self_bias=(1,)),
        dict(segments=(1, 5)),
        dict(rotary=(np.arange(4), 1e4)),
    ],
)
def test_shapes_that_do_not_fit_are_named(change):
    arrays, fixed = layer_of("shared diagonal")
    name = next(iter(change))
    made = {n: x if n == "rotary" else np.zeros(x, np.float32) for n, x in change.items()}
    for function in (interaction_energy, interaction_force):
        with pytest.raises(ValueError, match=name):
            function(**{**arrays, **fixed, **made})
    with pytest.raises(ValueError, match="preconditioner"):
        interaction_force(**arrays, **fixed, preconditioner=np.zeros((6, 6)))


# Cost.


def flops(function, *arguments) -> float:
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("exact", [False, True])
def test_autodiff_costs_no_more_than_the_closed_form(implementation, exact):
    """Count a force and the training gradient through it; blockwise uses one tile, because XLA
    counts a loop's body once."""
    rng = np.random.default_rng(4)
    sizes = dict(positions=64, dim=64, heads=2, width=32, leading=(2,), diagonal="shared")
    arrays = {n: x.astype(np.float32) for n, x in random_layer(rng, **sizes).items()}
    how = dict(exact=exact, implementation=implementation)
    force = lambda update: lambda t: layer_force(t, None, dict(tau=TAU), update=update, **how)
    training = lambda update: jax.grad(lambda t: (force(update)(t) ** 2).sum())
    for function in (force, training) if exact else (force,):
        counts = flops(function("autodiff"), arrays), flops(function("closed_form"), arrays)
        assert abs(counts[0] - counts[1]) <= 0.01 * counts[1], counts

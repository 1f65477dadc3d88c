import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, compiled_quickly, random_inputs, total_log_partition

from cem_jax.kernels import log_partition

TAU = 1.7
# Every number of positions, kind of diagonal, bias, mask and leading axes at least once, with
# blocks that divide J, do not divide it, exceed it, and differ for queries and keys.
CASES = {
    "J1": (dict(positions=1, diagonal="shared", segments=True), None),
    "J2": (dict(positions=2, leading=(2,), diagonal="per_head"), (4, 3)),
    "J5": (dict(positions=5, leading=(2, 1), diagonal="shared", segments=True), (2, 3)),
    "J5-plain": (dict(positions=5, heads=1, slopes=False, self_bias=False), (1, 1)),
    "J63": (dict(positions=63, slopes=False, diagonal="per_head"), None),
    "J64": (dict(positions=64, leading=(2,), diagonal="shared", self_bias=False), (32, 16)),
    "J65": (dict(positions=65, leading=(1,), segments=True), None),
    "J127": (dict(positions=127, diagonal="shared", segments=True, heads=3), (48, 64)),
    "J130": (dict(positions=130, leading=(2,), diagonal="per_head", segments=True), None),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    sizes, blocks = CASES[request.param]
    return random_inputs(np.random.default_rng(len(request.param)), **sizes), blocks


def split(inputs: dict) -> tuple[dict, dict]:
    """Split the inputs into those that are differentiated and the rest."""
    return (
        {n: x for n, x in inputs.items() if n != "segments"},
        {n: x for n, x in inputs.items() if n == "segments"},
    )


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_value_is_the_sum_over_the_keys(x64, case, implementation):
    inputs, blocks = case
    expected = attention(**inputs, tau=TAU)[0]
    how = dict(tau=TAU, implementation=implementation, block_sizes=blocks)
    both = lambda t: (log_partition(**t, **how), total_log_partition(**t, **how))
    lse, total = compiled_quickly(both, inputs)(inputs)
    assert lse.dtype == total.dtype == jnp.float64
    np.testing.assert_allclose(lse, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(total, expected.sum(-2), rtol=1e-12, atol=1e-12)


def derivatives(inputs: dict, blocks, implementation: str, wanted: tuple) -> dict:
    """Return first derivatives and, along random directions, second ones, in every input.

    `query` and `energy` take the inner gradient in the state alone, as training does.
    """
    rng = np.random.default_rng(1)
    floats, rest = split(inputs)
    how = dict(tau=TAU, implementation=implementation, block_sizes=blocks, **rest)
    bar = rng.normal(size=log_partition(**inputs, tau=TAU, implementation="dense").shape)
    directions = {n: rng.normal(size=np.shape(x)) for n, x in floats.items()}
    state = {n: floats[n] for n in ("q", "g") if n in floats}

    def along(gradient):
        return sum(jnp.vdot(directions[n], x) for n, x in gradient.items())

    weighted = lambda t: (bar * log_partition(**t, **how)).sum()
    curved = lambda t: jnp.sin(bar.sum(-2) + total_log_partition(**t, **how)).sum()

    def state_force(function):
        return lambda t: along(jax.grad(lambda s: function({**t, **s}))({n: t[n] for n in state}))

    def attention_alone(t):
        """Differentiate as a layer in Algorithm 1's mode does: in the query, with g held fixed."""
        return along({"q": jax.grad(lambda q: curved({**t, "q": q}))(t["q"])})

    kinds = {
        "first": jax.grad(weighted),
        "second": jax.grad(lambda t: along(jax.grad(weighted)(t))),
        "state": jax.grad(state_force(weighted)),
        "energy": jax.grad(state_force(curved)),
        "query": jax.grad(attention_alone),
    }
    together = lambda t: {kind: kinds[kind](t) for kind in wanted}
    return compiled_quickly(together, floats)(floats)


def test_derivatives_of_blockwise_are_those_of_dense(x64, case):
    inputs, blocks = case
    positions, wanted = inputs["q"].shape[-3], ("energy",)
    if "g" in inputs and positions in (5, 130):  # shared, and one per head
        wanted += ("query", "first", "second", *(("state",) if positions == 5 else ()))
    dense = derivatives(inputs, blocks, "dense", wanted)
    blockwise = derivatives(inputs, blocks, "blockwise", wanted)
    assert jax.tree.structure(dense) == jax.tree.structure(blockwise)
    for kind, gradients in dense.items():
        for name, expected in gradients.items():
            np.testing.assert_allclose(
                blockwise[kind][name], expected, rtol=1e-9, atol=1e-11, err_msg=f"{kind} {name}"
            )


def test_derivatives_are_finite_differences(x64):
    """Compare along one random direction of all inputs together, to second order."""
    rng = np.random.default_rng(2)
    floats, rest = split(random_inputs(rng, 5, leading=(1,), diagonal="shared", segments=True))
    direction = {n: rng.normal(size=x.shape) for n, x in floats.items()}
    bar = rng.normal(size=(1, 2, 5))
    value = lambda t: (bar * log_partition(**t, **rest, tau=TAU, implementation="dense")).sum()
    along = lambda t: sum(jnp.vdot(direction[n], x) for n, x in t.items())
    slope = lambda t: along(jax.grad(value)(t))
    f = compiled_quickly(lambda t: (value(t), slope(t), along(jax.grad(slope)(t))), floats)
    step = 1e-5
    ahead, behind = (
        f({n: x + sign * step * direction[n] for n, x in floats.items()}) for sign in (1, -1)
    )
    _, first, second = f(floats)
    np.testing.assert_allclose(first, (ahead[0] - behind[0]) / (2 * step), rtol=1e-7)
    np.testing.assert_allclose(second, (ahead[1] - behind[1]) / (2 * step), rtol=1e-7)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_hidden_pairs_have_no_derivative(implementation):
    rng = np.random.default_rng(3)
    inputs = random_inputs(rng, 6, diagonal="shared")
    inputs["segments"] = segments = np.array([0, 0, 1, 0, 1, 1])
    floats, rest = split(inputs)
    f = lambda t: log_partition(
        **t, **rest, tau=TAU, implementation=implementation, block_sizes=(4, 2)
    )
    by_input = jax.jit(jax.jacrev(f))(floats)  # each [K, I, ...]
    i, j = np.indices((6, 6))
    visible = (j <= i) & (segments[i] == segments[j])
    for name, axes in (("k", (0, 3, 4)), ("h", (0, 3))):
        influence = np.abs(by_input[name]).sum(axes)
        assert (influence[~visible] == 0).all(), name
        assert (influence[visible] > 0).all(), name
    for name, axes in (("q", (0, 3, 4)), ("g", (0, 3))):
        assert (np.abs(by_input[name]).sum(axes)[i != j] == 0).all(), name


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_logits_stay_finite(implementation, scale):
    rng = np.random.default_rng(4)
    k = rng.normal(size=(9, 2, 4)).astype(np.float32)
    q = scale * np.sign(k) * np.abs(rng.normal(size=k.shape)).astype(np.float32)
    f = lambda q, k, s: log_partition(
        q, k, tau=1.0, slopes=s, implementation=implementation, block_sizes=(2, 4)
    )
    slopes = np.ones(2, np.float32)

    @jax.jit
    def derivatives(q):
        lse, pull_back = jax.vjp(f, q, k, slopes)
        force = jax.grad(lambda q: f(q, k, slopes).sum())
        return lse, pull_back(jnp.ones_like(lse)), jax.grad(lambda q: (force(q) ** 2).sum())(q)

    lse, gradients, second = derivatives(q)
    assert np.abs(lse).max() > 1e4
    expected = attention(*(x.astype(np.float64) for x in (q, k)), tau=1.0, slopes=slopes)[0]
    np.testing.assert_allclose(lse, expected, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in (*gradients, second))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_low_precision_in_float32_out(implementation, dtype):
    """Compare with float32 on the rounded inputs, to exclude the rounding of the inputs."""
    rng = np.random.default_rng(5)
    raw = random_inputs(rng, 20, leading=(2,), diagonal="shared")
    low = {n: jnp.asarray(x, dtype) for n, x in raw.items()}
    wide = {n: x.astype(jnp.float32) for n, x in low.items()}
    how = dict(tau=TAU, implementation=implementation, block_sizes=(8, 8))
    bar = jnp.asarray(rng.normal(size=(2, 2, 20)), jnp.float32)

    def value_and_gradient(t, how):
        lse, pull_back = jax.vjp(lambda t: log_partition(**t, **how), t)
        return lse, pull_back(bar)[0]

    lse, gradients = jax.jit(lambda t: value_and_gradient(t, how))(low)
    exact, exact_gradients = jax.jit(
        lambda t: value_and_gradient(t, dict(tau=TAU, implementation="dense"))
    )(wide)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, exact, rtol=1e-5, atol=1e-5)  # float32's order of summation
    # factors and sum of each product are rounded once: a few units in the last place
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    for name, gradient in gradients.items():
        assert gradient.dtype == low[name].dtype
        expected = exact_gradients[name]
        error = jnp.abs(gradient.astype(jnp.float32) - expected).max()
        assert error <= tolerance * jnp.abs(expected).max(), name


def test_a_query_with_one_key_is_at_rest_in_bfloat16():
    """Its softmax is 1 for any query, so o does not move, not even by rounding."""
    rng = np.random.default_rng(6)
    q, k = (jnp.asarray(rng.normal(size=(1, 2, 8)), jnp.bfloat16) for _ in range(2))
    bar = jnp.asarray(rng.normal(size=q.shape), jnp.float32)

    def pulled(q):
        force = jax.grad(
            lambda q: total_log_partition(q=q, k=k, tau=TAU, implementation="blockwise").sum()
        )(q)
        return (bar * force.astype(jnp.float32)).sum()

    # a dot product of eight float32 terms may be summed in two orders
    np.testing.assert_allclose(np.asarray(jax.grad(pulled)(q), np.float32), 0, atol=1e-6)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_array_likes_and_number_types(x64, implementation):
    rng = np.random.default_rng(7)
    inputs = random_inputs(rng, 4, diagonal="shared", segments=True)
    how = dict(implementation=implementation)
    expected = log_partition(**inputs, tau=2.0, **how)
    lists = {n: x.tolist() for n, x in inputs.items()}
    np.testing.assert_array_equal(log_partition(**lists, tau=2.0, **how), expected)
    for tau in (2, np.array(2.0)):
        np.testing.assert_array_equal(log_partition(**inputs, tau=tau, **how), expected)
    single = {n: x if n == "segments" else x.astype(np.float32) for n, x in inputs.items()}
    assert log_partition(**single, tau=np.sqrt(4.0), **how).dtype == jnp.float32
    blocks = log_partition(**inputs, tau=2.0, block_sizes=[3, np.int64(2)], **how)
    np.testing.assert_allclose(blocks, expected, rtol=1e-12)
    inputs["segments"] = inputs["segments"].astype(np.uint32)
    np.testing.assert_array_equal(log_partition(**inputs, tau=2.0, **how), expected)


def test_segments_may_be_any_integers(x64):
    """Includes −1, which blockwise uses as padding; auto is blockwise here."""
    rng = np.random.default_rng(8)
    inputs = random_inputs(rng, 5, segments=True)
    inputs["segments"] = np.array([-1, 7, -1, -1, 7])
    expected = attention(**inputs, tau=TAU)[0]
    lse = log_partition(**inputs, tau=TAU, implementation="auto", block_sizes=(3, 4))
    np.testing.assert_allclose(lse, expected, rtol=1e-12)


def test_vmap_and_an_unused_result(x64):
    rng = np.random.default_rng(9)
    inputs = random_inputs(rng, 5, leading=(3,), diagonal="shared", slopes=False, self_bias=False)
    f = lambda t: total_log_partition(**t, tau=TAU, implementation="blockwise", block_sizes=(2, 3))
    gradient = lambda t: jax.grad(lambda t: f(t).sum())(t)
    unread = jax.grad(lambda t: jax.lax.stop_gradient(f(t)).sum() + t["q"].sum())
    mapped, whole, unused = jax.jit(lambda t: (jax.vmap(gradient)(t), gradient(t), unread(t)))(
        inputs
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), mapped, whole)
    np.testing.assert_array_equal(unused["q"], 1.0)
    np.testing.assert_array_equal(unused["k"], 0.0)


def temporary_bytes(positions: int) -> int:
    """Return the temporary bytes of a compiled force and the training gradient through it."""
    shape = jax.ShapeDtypeStruct((1, positions, 2, 16), jnp.float32)
    wide = jax.ShapeDtypeStruct((1, positions, 32), jnp.float32)

    def loss(q, k, g, h):
        energy = lambda q, g: total_log_partition(
            q=q, k=k, g=g, h=h, tau=4.0, implementation="blockwise", block_sizes=(64, 64)
        ).sum()
        force, own = jax.grad(energy, argnums=(0, 1))(q, g)
        return (force**2).sum() + (own**2).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(shape, shape, wide, wide)
    return compiled.compile().memory_analysis().temp_size_in_bytes


def test_blockwise_memory_grows_linearly():
    few, many = temporary_bytes(512), temporary_bytes(2048)
    assert many <= 4.2 * few
    assert many < 2 * 2048**2 * 4 / 2  # half of one array of scores of the two heads


def shapes(*, q=(2, 5, 3, 4), k=(2, 5, 3, 4), **others):
    return {n: np.zeros(s, np.float32) for n, s in dict(q=q, k=k, **others).items()}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (shapes(q=(5, 4), k=(5, 4)), ["q and k", "(5, 4)"]),
        (shapes(k=(2, 6, 3, 4)), ["q and k", "(2, 5, 3, 4)", "(2, 6, 3, 4)"]),
        (shapes(k=(5, 3, 4)), ["(2, 5, 3, 4)", "(5, 3, 4)"]),
        (shapes(g=(2, 5, 6)), ["g and h"]),
        (shapes(h=(2, 5, 6)), ["g and h"]),
        (shapes(g=(2, 5, 6), h=(5, 6)), ["h", "(5, 6)"]),
        (shapes(g=(2, 5, 6), h=()), ["h", "()"]),
        (shapes(g=(2, 5, 7), h=(2, 5, 6)), ["g", "(2, 5, 7)"]),
        (shapes(g=(2, 5, 1, 6), h=(2, 5, 6)), ["g", "(2, 5, 1, 6)"]),
        (shapes(slopes=(2,)), ["slopes", "[3]", "(2,)"]),
        (shapes(slopes=()), ["slopes", "()"]),
        (shapes(self_bias=(1, 3)), ["self_bias", "(1, 3)"]),
        (shapes(segments=(5,)), ["segments", "(5,)"]),
        ({n: x.astype(int) for n, x in shapes().items()}, ["floating", "int"]),
        ({**shapes(), "implementation": "fast"}, ["dense", "blockwise", "'fast'"]),
        ({**shapes(), "tau": 0.0}, ["tau", "0.0"]),
        ({**shapes(), "tau": float("nan")}, ["tau", "nan"]),
        ({**shapes(), "block_sizes": (0, 4)}, ["block_sizes", "(0, 4)"]),
        ({**shapes(), "block_sizes": (4,)}, ["block_sizes", "(4,)"]),
        ({**shapes(), "block_sizes": 64}, ["block_sizes", "64"]),
        ({**shapes(), "block_sizes": "64"}, ["block_sizes", "'64'"]),
        ({**shapes(), "block_sizes": (64.7, 64)}, ["block_sizes", "64.7"]),
        ({**shapes(), "segments": np.zeros((2, 5), np.float32)}, ["segments", "float32"]),
        ({n: x[:0] for n, x in shapes().items()}, ["empty", "(0, "]),
    ],
)
def test_what_does_not_fit_is_named(inputs, words):
    with pytest.raises(ValueError) as error:
        log_partition(**{"tau": 1.0, "implementation": "blockwise", **inputs})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_traced_tau_is_refused():
    q = np.ones((3, 2, 4), np.float32)
    with pytest.raises(ValueError, match="static"):
        jax.jit(lambda tau: log_partition(q, q, tau=tau))(2.0)

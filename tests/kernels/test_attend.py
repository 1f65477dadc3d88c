import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attend, attention, call_of, compiled_quickly, random_inputs

from cem_jax.kernels import Options, attend_cached

TAU = 1.3
CASES = {
    "keys": (dict(positions=7, leading=(2,)), "none"),
    "values": (dict(positions=7, values=True, segments=True), "none"),
    "summed": (dict(positions=9, diagonal="shared", segments=True), "summed"),
    "summed of per-head": (dict(positions=5, diagonal="per_head", values=True), "summed"),
    "per-head": (dict(positions=9, leading=(1, 2), diagonal="per_head"), "per_head"),
    "per-head of shared": (dict(positions=6, diagonal="shared"), "per_head"),
}


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", CASES)
def test_averages_are_those_of_the_loops(x64, name, implementation):
    sizes, average = CASES[name]
    inputs = random_inputs(np.random.default_rng(0), **sizes)
    how = dict(tau=TAU, average=average, implementation=implementation, block_sizes=(4, 3))
    lse, o, a = compiled_quickly(lambda t: attend(**t, **how), inputs)(inputs)
    expected_lse, expected_o, expected_a = attention(**inputs, tau=TAU)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)
    np.testing.assert_allclose(o, expected_o, rtol=1e-12)
    if average == "none":
        assert a is None
    else:
        expected_a = expected_a.sum(-2) if average == "summed" else expected_a
        np.testing.assert_allclose(a, expected_a, rtol=1e-11)


@pytest.mark.parametrize("name", ["values", "summed", "summed of per-head", "per-head"])
def test_blockwise_gradients_are_those_of_dense(x64, name):
    sizes, average = CASES[name]
    rng = np.random.default_rng(1)
    inputs = random_inputs(rng, **sizes)
    segments = inputs.pop("segments", None)

    def gradients(implementation):
        f = lambda t: attend(
            **t, segments=segments, tau=TAU, average=average, implementation=implementation,
            block_sizes=(4, 3),
        )  # fmt: skip
        loss = lambda t: sum(jnp.sin(x + 1).sum() for x in jax.tree.leaves(f(t)))
        return compiled_quickly(jax.grad(loss), inputs)(inputs)

    dense, blockwise = gradients("dense"), gradients("blockwise")
    for n, expected in dense.items():
        np.testing.assert_allclose(blockwise[n], expected, rtol=1e-10, atol=1e-12, err_msg=n)


@pytest.mark.parametrize("average", ["summed", "per_head"])
def test_bfloat16_products_sum_in_float32(average):
    """Covers every product of both implementations and its gradient; XLA on CPU lacks some."""
    diagonal = "shared" if average == "summed" else "per_head"
    inputs = random_inputs(np.random.default_rng(3), 4, leading=(2,), diagonal=diagonal)
    low = {n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()}
    found = {}
    for implementation in ("dense", "blockwise"):
        f = lambda t, name=implementation: attend(
            **t, tau=TAU, average=average, implementation=name
        )
        loss = lambda t, f=f: sum(jnp.sin(x).sum() for x in jax.tree.leaves(f(t)))
        both = jax.jit(lambda t, f=f, loss=loss: (f(t), jax.grad(loss)(t)))
        results, gradients = found[implementation] = both(low)
        assert {x.dtype for x in jax.tree.leaves(results)} == {jnp.dtype(jnp.float32)}
        assert {x.dtype for x in gradients.values()} == {jnp.dtype(jnp.bfloat16)}
    wide = lambda x: np.asarray(x, np.float32)
    # sums of a few terms of size one, each rounded at 2⁻⁸
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(wide(a), wide(b), atol=0.1, rtol=0.05),
        found["dense"],
        found["blockwise"],
    )


@pytest.mark.parametrize("name", ["values", "summed", "per-head"])
def test_over_a_cache(x64, name):
    """The last two queries attend over a cache whose unwritten part holds arbitrary values."""
    sizes, average = CASES[name]
    inputs = random_inputs(
        np.random.default_rng(4), **{**sizes, "leading": (2,), "segments": False}
    )
    _, o, a = jax.jit(lambda t: attend(**t, tau=TAU, average=average, implementation="dense"))(
        inputs
    )
    start = inputs["q"].shape[1] - 2
    cached = {n: inputs[n][:, start:] for n in ("q", "g") if n in inputs}
    for n in ("k", "h", "v"):
        if n in inputs:
            cached[n] = np.concatenate([inputs[n], np.full_like(inputs[n], 1e3)], axis=1)
    biases = {n: inputs[n] for n in ("slopes", "self_bias")}
    options = Options(TAU, average)
    over_the_cache = jax.jit(
        lambda t: attend_cached(call_of(**t, **biases), options, jnp.asarray(start))
    )
    _, found_o, found_a = over_the_cache(cached)
    np.testing.assert_allclose(found_o, o[:, start:], rtol=1e-11)
    assert (found_a is None) == (a is None)
    if a is not None:
        np.testing.assert_allclose(found_a, a[:, start:], rtol=1e-11)
    low = {n: jnp.asarray(x, jnp.bfloat16) for n, x in cached.items()}
    for x in over_the_cache(low):
        assert x is None or x.dtype == jnp.float32


def test_refusals():
    q = np.zeros((3, 2, 4), np.float32)
    with pytest.raises(ValueError, match="averages h"):
        attend(q=q, k=q, tau=TAU, average="summed")
    with pytest.raises(ValueError, match="v must be"):
        attend(q=q, k=q, tau=TAU, v=q[..., :1])
    for average in ("sum", None):
        with pytest.raises(ValueError, match="none, summed, per_head"):
            Options(TAU, average)
    q = q[None]
    for start in (-1, 1):
        with pytest.raises(ValueError, match="cache of 3"):
            attend_cached(call_of(q=q, k=q), Options(TAU), start)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, random_inputs

from cem_jax.kernels import attend

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
    sizes, context = CASES[name]
    inputs = random_inputs(np.random.default_rng(0), **sizes)
    how = dict(tau=TAU, context=context, implementation=implementation, block_sizes=(4, 3))
    lse, o, a = attend(**inputs, **how)
    expected_lse, expected_o, expected_a = attention(**inputs, tau=TAU)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)
    np.testing.assert_allclose(o, expected_o, rtol=1e-12)
    if context == "none":
        assert a is None
    else:
        expected_a = expected_a.sum(-2) if context == "summed" else expected_a
        np.testing.assert_allclose(a, expected_a, rtol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_blockwise_gradients_are_those_of_dense(x64, name):
    sizes, context = CASES[name]
    rng = np.random.default_rng(1)
    inputs = random_inputs(rng, **sizes)
    segments = inputs.pop("segments", None)

    def gradients(implementation):
        f = lambda t: attend(
            **t, segments=segments, tau=TAU, context=context, implementation=implementation,
            block_sizes=(4, 3),
        )  # fmt: skip
        results, pull_back = jax.vjp(f, inputs)
        bars = np.random.default_rng(2)
        return pull_back(jax.tree.map(lambda x: jnp.asarray(bars.normal(size=x.shape)), results))[0]

    dense, blockwise = gradients("dense"), gradients("blockwise")
    for n, expected in dense.items():
        np.testing.assert_allclose(blockwise[n], expected, rtol=1e-10, atol=1e-12, err_msg=n)


def test_dtypes_and_refusals():
    inputs = random_inputs(np.random.default_rng(3), 4, diagonal="shared")
    low = {n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()}
    for implementation in ("dense", "blockwise"):
        results = attend(**low, tau=TAU, context="summed", implementation=implementation)
        assert {x.dtype for x in results} == {jnp.dtype(jnp.float32)}
    with pytest.raises(ValueError, match="averages h"):
        attend(low["q"], low["k"], tau=TAU, context="summed")
    with pytest.raises(ValueError, match="v must be"):
        attend(low["q"], low["k"], tau=TAU, v=low["k"][..., :1])

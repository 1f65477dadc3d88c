"""Decoding with a cache gives the logits of the whole forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_configs import full_config, random_parameters

from cem_jax.config import with_steps
from cem_jax.model import pure

TOKENS = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
LLAMA = dict(kind="llama", position="rope", self_bias=False)
CASES = {
    "shared": {},
    "none": dict(diagonal="none"),
    "exact, one P a head": dict(diagonal="per_head", diagonal_in_update=True),
    "exact, one P": dict(diagonal_in_update=True, preconditioner_heads="shared"),
    "rope": dict(position="rope", residual="normalized", mlp_kind="gated"),
    "llama": LLAMA | dict(steps=1, mlp_kind="gated"),
    "llama, reused": LLAMA | dict(position="alibi", self_bias=True),
}


def decoded(config, parameters, dtype):
    """Return the logits of three positions at once and then one by one, and the cache."""
    bind = lambda p: pure.bind(config, p)
    cache = bind(parameters).cache(len(TOKENS), 7, dtype)  # one position more than is used

    @jax.jit
    def step(parameters, tokens, cache, start):
        return bind(parameters).decode(tokens, cache, start, dtype=dtype)

    logits = []
    for start, stop in ((0, 3), (3, 4), (4, 5), (5, 6)):
        part, cache = step(parameters, TOKENS[:, start:stop], cache, jnp.int32(start))
        logits.append(part)
    return np.concatenate(logits, 1), cache


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_decoding_equals_the_forward_pass(fields):
    config = full_config(**fields)
    parameters = random_parameters(config)
    # a reused layer caches each application, so its cache depends on the number of steps
    config = with_steps(config, attention=3) if config.attention.steps > 1 else config
    logits, cache = decoded(config, parameters, jnp.float64)
    expected = jax.jit(lambda p: pure.bind(config, p)(TOKENS))(parameters)
    np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-10)
    held = {name for name, value in cache._asdict().items() if value is not None}
    if config.attention.kind == "llama":
        assert held == {"k", "v"}
    else:
        assert held == ({"k"} if config.attention.diagonal == "none" else {"k", "h"})


def test_bfloat16():
    config = full_config()
    parameters = jax.tree.map(lambda p: p * 0.3, random_parameters(config, np.float32))
    logits, cache = decoded(config, parameters, jnp.bfloat16)
    assert logits.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}
    expected = pure.bind(config, parameters)(TOKENS, dtype=jnp.bfloat16)
    error = np.linalg.norm(np.float32(logits) - np.float32(expected))
    assert error < 0.05 * np.linalg.norm(np.float32(expected))

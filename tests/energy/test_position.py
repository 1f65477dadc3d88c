import jax
import jax.numpy as jnp
import numpy as np
import pytest
from energy_oracle import rotation

from cem_jax.energy import Rotary, alibi_slopes, rotate

# The slopes published by Press et al.
PRESS = {
    1: [2.0**-8],
    2: [2.0**-4, 2.0**-8],
    3: [2.0**-4, 2.0**-8, 2.0**-2],
    8: [2.0**-k for k in range(1, 9)],
    12: [2.0**-k for k in range(1, 9)] + [2.0 ** (-k - 0.5) for k in range(4)],
    16: [2.0 ** (-k / 2) for k in range(1, 17)],
}


@pytest.mark.parametrize("heads", PRESS)
def test_slopes(heads):
    np.testing.assert_allclose(alibi_slopes(heads, scheme="press"), PRESS[heads], rtol=1e-6)
    ours = alibi_slopes(heads)
    np.testing.assert_array_equal(ours, [2.0**-k for k in range(1, heads + 1)])
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, alibi_slopes(heads, scheme="power_of_two"))


def test_schemes_agree_at_8_heads_and_not_at_12():
    np.testing.assert_array_equal(alibi_slopes(8), alibi_slopes(8, "press"))
    assert not np.allclose(alibi_slopes(12), alibi_slopes(12, "press"))


def test_bad_slopes():
    with pytest.raises(ValueError, match="power_of_two, press; got 'linear'"):
        alibi_slopes(4, "linear")
    with pytest.raises(ValueError, match="at least 1; got 0"):
        alibi_slopes(0)


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_rotate_applies_the_matrix_and_inverse_its_transpose(x64, leading):
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(*leading, 5, 2, 6)), rng.integers(0, 5000, 5)
    matrices = np.stack([rotation(p, 6, 500.0) for p in positions])
    rotary = Rotary(positions, 500.0)
    expected = np.einsum("jrs,...jks->...jkr", matrices, x)
    np.testing.assert_allclose(rotate(x, rotary), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(rotate(rotate(x, rotary), rotary, inverse=True), x, rtol=1e-12)
    transposed = np.einsum("jsr,...jks->...jkr", matrices, x)
    np.testing.assert_allclose(rotate(x, rotary, inverse=True), transposed, rtol=1e-10, atol=1e-10)
    each_its_own = np.broadcast_to(positions, (*leading, 5))
    np.testing.assert_array_equal(rotate(x, Rotary(each_its_own, 500.0)), rotate(x, rotary))


def test_products_depend_only_on_distance(x64):
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 7, 1, 8))
    products = lambda start: jnp.einsum(
        "irs,jrs->ij",
        *(rotate(x[:, None, 0], Rotary(start + np.arange(7))) for x in (q, k)),
    )
    np.testing.assert_allclose(products(0), products(1234), rtol=1e-9, atol=1e-9)


def test_no_positions_dtype_and_refusals():
    x = jnp.ones((2, 3, 1, 4), jnp.bfloat16)
    assert rotate(x, None) is x
    assert rotate(x, Rotary(jnp.arange(3))).dtype == jnp.bfloat16
    assert (
        jax.grad(lambda x: rotate(x, Rotary(np.arange(3))).astype(jnp.float32).sum())(x).dtype
        == jnp.bfloat16
    )
    with pytest.raises(ValueError, match="even head dimension; got 3"):
        rotate(x[..., :3], Rotary(jnp.arange(3)))
    for positions in (jnp.arange(4), jnp.arange(1), jnp.zeros((1, 3)), jnp.asarray(2)):
        with pytest.raises(ValueError, match="rotary positions"):
            rotate(x, Rotary(positions))

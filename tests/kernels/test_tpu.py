"""The resident TPU kernels in Pallas' interpreter against `dense`, and their lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import compiled_quickly
from fused_cases import (
    check,
    cotangents,
    draw,
    fused,
    interpreted,
    on_device,
    plain,
    relative,
    run,
    run_watched,
    shapes,
)

from cem_jax.kernels import Options, Outputs
from cem_jax.kernels.tpu.attention import IMPLEMENTATION

TAU = 6.0
SHARED = dict(diagonal="shared")
PER_HEAD = dict(diagonal="per_head")
# Every width, number of positions, diagonal, bias, mask and average at least once; one block and
# several, chosen and given; query blocks as long as key blocks and longer.
CASES = {
    "J1": (1, dict(width=56, **SHARED), "none", None),
    "J5": (5, dict(width=84, batch=2, segments=True, **SHARED), "none", None),
    "J5-exact": (5, dict(width=28, segments=True, **PER_HEAD), "summed", None),
    "J127": (127, dict(width=72, self_bias=False), "none", None),
    "J128-plain": (128, dict(width=3, heads=1, slopes=False, self_bias=False), "none", None),
    "J129": (129, dict(width=84, segments=True), "none", (128, 128)),
    "J129-exact": (129, dict(width=84, values=True, **SHARED), "summed", (256, 128)),
    "J200": (200, dict(width=28, heads=3, dim=200, batch=2, **SHARED), "none", (128, 128)),
    "J200-per-head": (200, dict(width=64, values=True, **PER_HEAD), "none", (128, 128)),
    "J256": (256, dict(width=72, values=True, segments=True), "none", (256, 128)),
    "J300": (300, dict(width=16, slopes=False, **SHARED), "summed", (128, 128)),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradients_are_those_of_dense(name):
    positions, what, average, blocks = CASES[name]
    check(IMPLEMENTATION, draw(positions, **what), average, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("positions", (1, 5, 127, 128, 129, 200, 256))
@pytest.mark.parametrize("width", (28, 56, 64, 72, 84))
@pytest.mark.parametrize(
    ("diagonal", "average"),
    [("none", "none"), ("shared", "none"), ("per_head", "none"), ("shared", "summed")],
)
def test_every_width_and_number_of_positions(positions, width, diagonal, average):
    for segments in (False, True):
        values = segments == (positions % 2 == 0)  # alternating: both with every mask and width
        inputs = draw(positions, width=width, diagonal=diagonal, segments=segments, values=values)
        check(IMPLEMENTATION, inputs, average, blocks=(128, 128))


@pytest.mark.parametrize("average", ["none", "summed"])
def test_unwritten_memory_and_races(average, capfd, caplog):
    inputs = draw(140, heads=2, width=12, dim=24, segments=True, **SHARED)
    watched = run_watched(capfd, caplog, IMPLEMENTATION, inputs, average, (128, 128))
    plainly = run(IMPLEMENTATION, inputs, average, (128, 128), True)
    for x, y in zip(jax.tree.leaves(watched), jax.tree.leaves(plainly), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_five_runs_agree_to_the_bit():
    inputs = draw(200, heads=2, width=12, dim=24, **SHARED)
    bar = cotangents(inputs, "none")
    both = compiled_quickly(fused(IMPLEMENTATION, interpreted(blocks=(128, 128))), inputs, bar)
    first, *rest = (jax.tree.leaves(both(inputs, bar)) for _ in range(5))
    for other in rest:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_what_stands_in_later_positions_does_not_matter():
    """Huge keys and queries after a position leave earlier outputs bit for bit unchanged."""
    inputs = draw(200, heads=2, width=12, dim=24, **SHARED)
    spoilt = inputs._replace(
        **{n: getattr(inputs, n).at[:, 150:].set(1e9) for n in ("q", "k", "g", "h")}
    )
    options = interpreted(blocks=(128, 128))
    forward = compiled_quickly(lambda t: IMPLEMENTATION.forward(t, options), inputs)
    (lse, o, _), (spoilt_lse, spoilt_o, _) = forward(inputs), forward(spoilt)
    np.testing.assert_array_equal(spoilt_lse[..., :150], lse[..., :150])
    np.testing.assert_array_equal(spoilt_o[:, :150], o[:, :150])


@pytest.mark.parametrize("what", [SHARED, dict(values=True), PER_HEAD])
def test_bfloat16_errs_no_more_than_xla(what):
    inputs = draw(200, dtype=jnp.bfloat16, batch=2, width=56, dim=112, **what)
    wide = inputs.map(lambda x: x.astype(jnp.float32))
    bar = cotangents(inputs, "none")
    exact = compiled_quickly(plain(Options(TAU)), wide, bar)(wide, bar)
    found = run(IMPLEMENTATION, inputs, "none", (128, 128))
    # XLA too rounds the softmax to bfloat16
    xla = compiled_quickly(plain(Options(TAU)), inputs, bar)(inputs, bar)
    assert relative(found[0][0], exact[0][0]) <= 1e-5
    assert relative(found[0][1], exact[0][1]) <= 1.5 * relative(xla[0][1], exact[0][1])
    for name in ("q", "k", "v", "g", "h"):
        x, y, z = (getattr(part[1], name) for part in (found, xla, exact))
        if x is not None:
            assert x.dtype == jnp.bfloat16
            assert relative(x, z) <= 1.5 * relative(y, z), name


def test_float16_comes_back_as_float16():
    inputs = draw(130, dtype=jnp.float16, heads=1, width=12, dim=24, **SHARED)
    (_, o, _), gradients = run(IMPLEMENTATION, inputs, "none", (128, 128))
    assert o.dtype == jnp.float32
    assert {gradients.q.dtype, gradients.h.dtype} == {jnp.dtype(jnp.float16)}


# Lowering and refusals.

KINDS = ("TPU v5 lite", "TPU v6 lite", "TPU v5p", "TPU7x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "width", "dtype"), [(12, 56, "bfloat16"), (8, 84, "float32")])
def test_lowers_for_tpus(kind, heads, width, dtype):
    inputs = shapes(700, heads=heads, width=width, dtype=jnp.dtype(dtype))
    f32 = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32)
    lse = jax.ShapeDtypeStruct((2, heads, 700), jnp.float32)
    bar = Outputs(lse, f32(inputs.q), f32(inputs.h))
    with on_device(kind):
        options = Options(TAU, "summed")
        assert IMPLEMENTATION.obstacle(inputs, options) is None
        traced = jax.jit(fused(IMPLEMENTATION, options)).trace(inputs, bar)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2


def test_refusals():
    inputs = shapes(2048, heads=12, width=56)
    obstacle = IMPLEMENTATION.obstacle
    assert "for all heads together" in obstacle(inputs, Options(TAU, "per_head"))
    assert "128" in obstacle(inputs, Options(TAU, block_sizes=(64, 64)))
    assert "128" in obstacle(inputs, Options(TAU, block_sizes=(128, 256)))
    wide = inputs.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float64"))
    assert "float64" in obstacle(wide, Options(TAU))

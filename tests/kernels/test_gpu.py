import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import (
    SMALL,
    TAU,
    check,
    cotangents,
    draw,
    fused,
    interpreted,
    plain,
    relative,
)
from jax.experimental.pallas import triton

from cem_jax.kernels import Options, Unavailable, log_partition
from cem_jax.kernels.gpu.attention import IMPLEMENTATION

WIDTHS = (28, 56, 64, 72, 84)
POSITIONS = (1, 5, 127, 128, 129, 200, 256)
SHARED = dict(diagonal="shared")
# Every width, number of positions, diagonal, bias, mask and average at least once, blocks chosen
# and given, query blocks larger than key blocks and the other way round.
CASES = {
    "J1": (1, dict(width=56, **SHARED), "none", None),
    "J5": (5, dict(width=84, batch=2, segments=True, **SHARED), "none", None),
    "J5-exact": (5, dict(width=28, segments=True, **SHARED), "summed", None),
    "J127": (127, dict(width=72, self_bias=False), "none", (16, 32)),
    "J128": (128, dict(width=64, batch=2, slopes=False, **SHARED), "none", SMALL),
    "J128-plain": (128, dict(width=3, heads=1, slopes=False, self_bias=False), "none", SMALL),
    "J129": (129, dict(width=84, segments=True), "none", None),
    "J129-exact": (129, dict(width=84, values=True, **SHARED), "summed", (64, 64)),
    "J200": (200, dict(width=28, dim=200, **SHARED), "none", (64, 32)),
    "J40-per-head": (40, dict(width=28, diagonal="per_head", values=True), "summed", SMALL),
    "J256": (256, dict(width=72, values=True, segments=True), "none", (64, 64)),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradients_are_those_of_dense(name):
    positions, what, average, blocks = CASES[name]
    check(IMPLEMENTATION, draw(positions, **what), average, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("diagonal", "average"),
    [("none", "none"), ("shared", "none"), ("shared", "summed"), ("per_head", "none")],
)
def test_every_width_and_number_of_positions(positions, width, diagonal, average):
    for both in (False, True):
        inputs = draw(positions, width=width, diagonal=diagonal, segments=both, values=both)
        check(IMPLEMENTATION, inputs, average, blocks=None)


@pytest.mark.parametrize("common", [0.0, 4.0], ids=["", "large scores"])
@pytest.mark.parametrize("average", ["none", "summed"])
def test_bfloat16_is_as_exact_as_unfused(average, common):
    """Compare errors against float32 on the rounded inputs with those of XLA's own bfloat16.

    lse has the error of a tile in float16: half a unit in the eleventh binary digit of a score.
    `common` is added to every position's g and h, so that diagonal scores are near 100; then dg and
    dh also show what Σ_k dS^k loses to bfloat16, where XLA rounds each head's dS by itself.
    """
    low = draw(128, width=28, dtype=jnp.bfloat16, batch=2, **SHARED)
    low = low._replace(g=low.g + jnp.bfloat16(common), h=low.h + jnp.bfloat16(common))
    wide = low.map(lambda x: x.astype(jnp.float32))
    bar = cotangents(low, average)
    by_xla, by_kernels = (
        plain(Options(TAU, average)),
        fused(IMPLEMENTATION, interpreted(average, None)),
    )
    run = lambda f, inputs: jax.tree.leaves(jax.jit(f)(inputs, bar))
    exact, ours, theirs = run(by_xla, wide), run(by_kernels, low), run(by_xla, low)
    names = ("lse", "o", *(("a",) if average == "summed" else ()), *"qkgh", "slopes", "self_bias")
    for name, x, y, z in zip(names, exact, ours, theirs, strict=True):
        if name not in ("slopes", "self_bias"):  # sums that cancel: the error is a matter of luck
            own = 2.0**-12 if name == "lse" else 0.0
            times = 2.5 if common and name in "gh" else 1.5
            assert relative(y, x) <= times * relative(z, x) + own, name


def test_padding_is_poisoned_here():
    """The ragged cases rely on the interpreter filling the rest of a last block with NaN."""

    def copy(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    from jax.experimental import pallas as pl

    spec = pl.BlockSpec((4,), lambda i: (0,))
    out = jax.ShapeDtypeStruct((4,), jnp.float32)
    call = pl.pallas_call(
        copy, out_shape=out, grid=(1,), in_specs=[spec], out_specs=spec, interpret=True
    )
    np.testing.assert_array_equal(call(jnp.ones(3)), [1, 1, 1, np.nan])


def test_same_inputs_same_bits():
    inputs = draw(129, width=56, segments=True, **SHARED)
    bar = cotangents(inputs, "summed")
    run = jax.jit(fused(IMPLEMENTATION, interpreted("summed", None)))
    first = run(inputs, bar)
    for _ in range(4):
        jax.tree.map(np.testing.assert_array_equal, run(inputs, bar), first)


def test_large_scores_stay_finite():
    """Includes diagonal scores beyond float16's range."""
    inputs = draw(40, width=16, dtype=jnp.bfloat16, **SHARED)
    inputs = inputs._replace(q=1e4 * inputs.q, g=1e5 * inputs.g)
    options = Options(1.0, implementation="pallas", interpret=True)
    outputs, gradients = jax.jit(fused(IMPLEMENTATION, options))(inputs, cotangents(inputs, "none"))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((outputs, gradients)))


def test_x64_changes_nothing(x64):
    inputs = draw(20, width=16, segments=True, **SHARED)
    run = jax.jit(fused(IMPLEMENTATION, interpreted(blocks=None)))
    outputs, _ = run(inputs, cotangents(inputs, "none"))
    assert {x.dtype for x in jax.tree.leaves(outputs)} == {jnp.dtype(jnp.float32)}


H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("positions", "what", "average"),
    [
        (256, dict(width=84, dtype=jnp.bfloat16, **SHARED), "none"),
        (200, dict(width=72, dtype=jnp.float16, segments=True, values=True, **SHARED), "summed"),
        (200, dict(width=56, dtype=jnp.float32, segments=True), "none"),
    ],
)
def test_lowers_for_a_gpu(positions, what, average):
    inputs = draw(positions, **what)
    bar = cotangents(inputs, average)
    f = jax.jit(fused(IMPLEMENTATION, Options(TAU, average)))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H200)):
        lowered = f.trace(inputs, bar).lower(lowering_platforms=("cuda",))
    kernels = lowered.as_text().count("__gpu$xla.gpu.triton")
    assert kernels >= (3 if inputs.g is None else 7)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.skipif(not hasattr(triton, "is_gpu_device"), reason="JAX lowers for no other device")
@pytest.mark.parametrize(
    ("kind", "words"), [("Tesla T4", "8.0 (Ampere), not 7.5"), ("Tesla V100-SXM2", "V100")]
)
def test_other_devices_run_blockwise(kind, words, caplog):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=80, platform="gpu")
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda q, k: log_partition(q, k, tau=TAU)).trace(x, x)
        lowered = traced.lower(lowering_platforms=("cuda",))
        with pytest.raises(Unavailable, match=re.escape(words)):
            demanded = lambda q, k: log_partition(q, k, tau=TAU, implementation="pallas")
            jax.eval_shape(demanded, x, x)
    assert "triton" not in lowered.as_text()
    assert words in caplog.text


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        (dict(dtype=jnp.float64), Options(TAU), ["float64"]),
        (dict(width=200), Options(TAU), ["128", "200"]),
        (SHARED, Options(TAU, "per_head"), ["average"]),
        ({}, Options(TAU, block_sizes=(48, 32)), ["powers of two", "(48, 32)"]),
        ({}, Options(TAU, block_sizes=(8, 32)), ["powers of two", "(8, 32)"]),
        ({}, Options(TAU, block_sizes=(64, 256)), ["powers of two", "(64, 256)"]),
    ],
)
def test_obstacles_are_named(x64, what, options, words):
    inputs = jax.eval_shape(lambda: draw(5, **what))
    reason = IMPLEMENTATION.obstacle(inputs, options)
    assert all(word in reason for word in words), reason

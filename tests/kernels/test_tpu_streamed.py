"""The streamed TPU kernels in Pallas' interpreter against `dense`, and the choice of kernel."""

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
from cem_jax.kernels.tpu import attention as tpu
from cem_jax.kernels.tpu.attention import IMPLEMENTATION, fitted, needed
from cem_jax.kernels.tpu.layout import spilled, vmem_capacity

TAU = 6.0
SHARED = dict(diagonal="shared")
PER_HEAD = dict(diagonal="per_head")
SMALL = dict(heads=2, width=12, dim=24)
# Every diagonal, bias, mask and average at least once; up to four blocks of queries, as long as
# key blocks and longer, so that a block of keys is read, added to and written again.
CASES = {
    "J5": (5, dict(width=84, batch=2, segments=True, **SHARED), "none", None),
    "J129-exact": (129, dict(width=72, segments=True, **SHARED), "summed", (128, 128)),
    "J300": (300, dict(width=56, self_bias=False), "none", (128, 128)),
    "J400-per-head": (400, dict(values=True, **SMALL, **PER_HEAD), "none", (128, 128)),
    "J520": (520, dict(segments=True, **SMALL, **SHARED), "none", (256, 128)),
    "J520-exact": (520, dict(values=True, slopes=False, **SMALL, **SHARED), "summed", (256, 128)),
}


@pytest.fixture
def streamed(monkeypatch):
    """Pretend that the resident kernels do not fit."""
    monkeypatch.setattr(tpu, "FORWARD", tpu.FORWARD[-1:])
    monkeypatch.setattr(tpu, "BACKWARD", tpu.BACKWARD[-1:])


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradients_are_those_of_dense(name, streamed):
    positions, what, average, blocks = CASES[name]
    check(IMPLEMENTATION, draw(positions, **what), average, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("positions", (1, 5, 127, 128, 129, 200, 256, 520))
@pytest.mark.parametrize("width", (28, 56, 64, 72, 84))
@pytest.mark.parametrize(
    ("diagonal", "average"),
    [("none", "none"), ("shared", "none"), ("per_head", "none"), ("shared", "summed")],
)
def test_every_width_and_number_of_positions(positions, width, diagonal, average, streamed):
    for segments in (False, True):
        values = segments == (positions % 2 == 0)  # alternating: both with every mask and width
        inputs = draw(positions, width=width, diagonal=diagonal, segments=segments, values=values)
        blocks = (256, 128) if positions > 256 else (128, 128)
        check(IMPLEMENTATION, inputs, average, blocks)


@pytest.mark.parametrize(
    ("positions", "average", "blocks"), [(270, "summed", (128, 128)), (520, "none", (256, 128))]
)
def test_unwritten_memory_and_races(positions, average, blocks, streamed, capfd, caplog):
    """Sums move from HBM and back while tiles are computed; no copies may overlap."""
    inputs = draw(positions, heads=1, width=12, dim=24, **SHARED)
    watched = run_watched(capfd, caplog, IMPLEMENTATION, inputs, average, blocks)
    plainly = run(IMPLEMENTATION, inputs, average, blocks, True)
    for x, y in zip(jax.tree.leaves(watched), jax.tree.leaves(plainly), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_five_runs_agree_to_the_bit(streamed):
    inputs = draw(390, **SMALL, **SHARED)
    bar = cotangents(inputs, "none")
    both = compiled_quickly(fused(IMPLEMENTATION, interpreted(blocks=(128, 128))), inputs, bar)
    first, *rest = (jax.tree.leaves(both(inputs, bar)) for _ in range(5))
    for other in rest:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_bfloat16_errs_no_more_than_xla(streamed):
    inputs = draw(260, dtype=jnp.bfloat16, heads=2, width=28, dim=56, **SHARED)
    wide = inputs.map(lambda x: x.astype(jnp.float32))
    bar = cotangents(inputs, "none")
    exact = compiled_quickly(plain(Options(TAU)), wide, bar)(wide, bar)
    found = run(IMPLEMENTATION, inputs, "none", (128, 128))
    xla = compiled_quickly(plain(Options(TAU)), inputs, bar)(inputs, bar)
    assert relative(found[0][0], exact[0][0]) <= 1e-5
    assert relative(found[0][1], exact[0][1]) <= 1.5 * relative(xla[0][1], exact[0][1])
    for name in ("q", "k", "g", "h"):
        x, y, z = (getattr(part[1], name) for part in (found, xla, exact))
        assert x.dtype == jnp.bfloat16
        assert relative(x, z) <= 1.5 * relative(y, z), name


# Lowering, and which kernel runs.

KINDS = ("TPU v4", "TPU v5 lite", "TPU v6 lite", "TPU v5p", "TPU7x")


@pytest.mark.parametrize("kind", KINDS)
def test_lowers_for_tpus(kind, streamed):
    inputs = shapes(700, heads=12, width=56)
    f32 = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32)
    lse = jax.ShapeDtypeStruct((2, 12, 700), jnp.float32)
    bar = Outputs(lse, f32(inputs.q), f32(inputs.h))
    with on_device(kind):
        options = Options(TAU, "summed")
        assert IMPLEMENTATION.obstacle(inputs, options) is None
        traced = jax.jit(fused(IMPLEMENTATION, options)).trace(inputs, bar)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2


RESIDENT = (False, False)
BACKWARD_STREAMED = (False, True)
STREAMED = (True, True)


@pytest.mark.parametrize(
    ("kind", "positions", "heads", "width", "expected"),
    [
        ("TPU v5 lite", 2048, 12, 72, RESIDENT),
        ("TPU v5p", 2048, 12, 72, RESIDENT),
        ("TPU v5 lite", 8192, 12, 72, BACKWARD_STREAMED),
        ("TPU v5p", 2048, 16, 128, BACKWARD_STREAMED),
        ("TPU v5 lite", 4096, 32, 128, STREAMED),
        ("TPU v6 lite", 4096, 32, 128, STREAMED),
        ("TPU v5p", 4096, 32, 128, STREAMED),
        ("TPU v4", 2048, 12, 56, STREAMED),
        ("TPU v5 lite", 1 << 20, 12, 72, STREAMED),
    ],
)
def test_kernels_are_resident_where_that_fits_and_streamed_elsewhere(
    kind, positions, heads, width, expected
):
    inputs = shapes(positions, heads=heads, width=width)
    with on_device(kind):
        assert IMPLEMENTATION.obstacle(inputs, Options(TAU)) is None
        chosen = [fitted(kernels, inputs, Options(TAU)) for kernels in (tpu.FORWARD, tpu.BACKWARD)]
    assert tuple(kernel.streamed for kernel, _ in chosen) == expected


@pytest.mark.parametrize("kernel", [tpu.FORWARD[-1], tpu.BACKWARD[-1]], ids=lambda x: x.name)
def test_vmem_does_not_grow_with_positions(kernel):
    options = Options(TAU, block_sizes=(512, 256))
    of = lambda positions: fitted((kernel,), shapes(positions, heads=12, width=72), options)
    assert needed(*of(1 << 20)) == needed(*of(1024))


def test_float32_tiles_leave_room_for_what_the_compiler_keeps_of_them():
    """Tiles of 512 × 512 once overfilled the VMEM, by 9.6 MiB that had not been counted."""
    inputs = shapes(1024, heads=16, width=64, dtype=jnp.float32)
    with on_device("TPU v5p"):
        assert IMPLEMENTATION.obstacle(inputs, Options(TAU)) is None
        kernel, sizes = fitted(tpu.BACKWARD, inputs, Options(TAU))
        assert needed(kernel, sizes) <= vmem_capacity()
    assert spilled(sizes) >= 10 * 4 * sizes.queries * sizes.keys
    assert spilled(sizes._replace(dtype=jnp.dtype(jnp.bfloat16))) == 0


def test_what_does_not_fit_a_block_at_a_time_is_refused():
    with on_device("TPU v4"):
        reason = IMPLEMENTATION.obstacle(shapes(2048, heads=128, width=128), Options(TAU))
    assert "128 heads" in reason and "the device has 16" in reason

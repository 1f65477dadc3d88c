"""The choice of implementation, and the guarantees of differentiable attention for each."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attend, random_inputs, total_log_partition

from cem_jax.kernels import Unavailable, dispatch, log_partition

TPU = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
GPU = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def on(device):
    """Trace for a device that this machine lacks."""
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def shared(positions=8, dtype=np.float32, **what):
    drawn = random_inputs(
        np.random.default_rng(0), positions, leading=(1,), diagonal="shared", **what
    )
    return {n: x.astype(dtype) if x.dtype == np.float64 else x for n, x in drawn.items()}


def lowered(inputs, platform, **how):
    f = lambda t: jax.grad(lambda q: total_log_partition(**{**t, "q": q}, tau=2.0, **how).sum())
    return jax.jit(lambda t: f(t)(t["q"])).trace(inputs).lower(lowering_platforms=(platform,))


# Deprecated in jax 0.11, in favour of Mosaic GPU; it serves Ampere too, and every jax supported
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_auto_is_the_fused_kernel_of_the_platform_compiled_for():
    assert "custom_call" not in lowered(shared(), "cpu").as_text()
    assert "tpu_custom_call" in lowered(shared(), "tpu").as_text()
    with on(GPU):
        assert "triton" in lowered(shared(), "cuda").as_text()
    assert "tpu_custom_call" not in lowered(shared(), "tpu", implementation="blockwise").as_text()


def test_auto_falls_back_with_one_logged_reason(caplog):
    dispatch._say_once.cache_clear()
    inputs = shared(dtype=np.float64)
    with jax.enable_x64(True), on(TPU), caplog.at_level(logging.WARNING, "cem_jax.kernels"):
        for _ in range(2):
            text = lowered(inputs, "tpu").as_text()
            assert "tpu_custom_call" not in text
            dispatch._forward.clear_cache()
    assert len(caplog.records) == 1
    assert "blockwise" in caplog.text and "float64" in caplog.text


def test_pallas_demanded_where_it_cannot_run_says_why(x64):
    inputs = shared()
    with pytest.raises(Unavailable, match="needs a TPU or a GPU, and this program is for cpu"):
        log_partition(**inputs, tau=1.0, implementation="pallas")
    inputs = {n: jnp.asarray(x, jnp.float64) for n, x in inputs.items()}
    with on(TPU), pytest.raises(Unavailable, match="float64"):
        lowered(inputs, "tpu", implementation="pallas")
    with on(TPU), pytest.raises(Unavailable, match="each"):
        how = dict(tau=1.0, average="per_head", implementation="pallas")
        jax.jit(lambda t: attend(**t, **how)).lower(shared())


def test_interpret_is_refused_without_a_fused_kernel():
    with pytest.raises(ValueError, match="interpret is for 'pallas'"):
        log_partition(**shared(), tau=1.0, implementation="blockwise", interpret=True)


def training_gradients(inputs, **how):
    """Differentiate a loss of the energy's gradient with respect to the state, as training does."""
    floats = {n: x for n, x in inputs.items() if n != "segments"}
    rest = {n: x for n, x in inputs.items() if n == "segments"}

    def loss(t):
        energy = lambda q, g: total_log_partition(
            **{**t, "q": q, "g": g}, **rest, tau=2.0, **how
        ).sum()
        force_q, force_g = jax.grad(energy, argnums=(0, 1))(t["q"], t["g"])
        return jnp.sin(3 * force_q).sum() + jnp.sin(force_g).sum()

    return jax.jit(jax.grad(loss))(floats)


def test_a_gradient_of_the_energy_is_the_fused_kernel_and_trains():
    inputs = shared(19, segments=True, width=8)
    fused = training_gradients(inputs, implementation="pallas", interpret=True)
    dense = training_gradients(inputs, implementation="dense")
    for name, expected in dense.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(fused[name], expected, atol=2e-5 * scale, err_msg=name)


def test_a_fused_backward_pass_can_be_differentiated():
    """Training needs no second derivatives in the keys, so plain XLA computes them."""
    inputs = shared(9, self_bias=False)

    def curvature(**how):
        value = lambda k: jnp.sin(log_partition(**{**inputs, "k": k}, tau=2.0, **how)).sum()
        along = lambda k: jnp.vdot(jnp.cos(k), jax.grad(value)(k))
        return jax.jit(jax.grad(along))(inputs["k"])

    fused = curvature(implementation="pallas", interpret=True)
    dense = curvature(implementation="dense")
    np.testing.assert_allclose(fused, dense, atol=1e-5 * np.abs(dense).max())

"""FLOPs against explicit formulas and against XLA's own count; peaks of devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from model_configs import model_config

from cem_jax.config import with_steps
from cem_jax.model import pure
from cem_jax.train.flops import (
    flops_per_token,
    folding_flops,
    forward_flops,
    mfu,
    peak_flops,
    training_flops_per_token,
)

D, K, M, V, L, J = 64, 4, 96, 128, 2, 64
SIZES = dict(dim=D, heads=K, mlp_dim=M, vocab_size=V, layers=L)
CEM = dict(kind="cem", mlp_kind="cem", **SIZES)
LLAMA = dict(kind="llama", mlp_kind="gated", position="rope", **SIZES)


def multiply_adds(**fields):
    """Return the multiply-adds of a token's forward pass at context J."""
    return flops_per_token(model_config(**fields), J) / 2


def test_llama():
    expected = L * (4 * D * D + 3 * D * M + 2 * D * (J + 1) / 2) + D * V
    assert multiply_adds(**LLAMA) == expected


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_plain_reuse_repeats_the_layer(steps):
    head = D * V
    once = multiply_adds(**LLAMA)
    assert multiply_adds(**LLAMA, steps=steps, mlp_steps=steps) - head == steps * (once - head)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(
    ("diagonal", "exact", "preconditioner", "p_heads", "pair"),
    [
        ("none", False, "diagonal", "per_head", 2 * D),
        ("shared", False, "diagonal", "per_head", 3 * D),
        ("per_head", False, "diagonal", "shared", (2 + K) * D),
        ("shared", True, "none", "per_head", 4 * D),
        ("shared", True, "diagonal", "shared", 4 * D),
        ("per_head", True, "none", "per_head", (2 + 2 * K) * D),
        ("shared", True, "diagonal", "per_head", (2 + 2 * K) * D),
    ],
)
def test_cem(steps, diagonal, exact, preconditioner, p_heads, pair):
    count = multiply_adds(
        **CEM,
        steps=steps,
        mlp_steps=steps,
        diagonal=diagonal,
        diagonal_in_update=exact,
        preconditioner=preconditioner,
        preconditioner_heads=p_heads,
    )
    products = (1 + 2 * steps) * (D * D + D * M)
    assert count == L * (products + steps * pair * (J + 1) / 2) + D * V


def test_a_low_rank_preconditioner_is_folded_per_pass_and_not_counted_per_token():
    low_rank = dict(preconditioner="diagonal_low_rank", mlp_preconditioner="diagonal_low_rank")
    ranks = dict(preconditioner_rank=3, mlp_preconditioner_rank=5)
    symmetric = model_config(**CEM, **low_rank, **ranks)
    assert flops_per_token(symmetric, J) == flops_per_token(model_config(**CEM), J)
    assert folding_flops(symmetric) == 2 * L * (4 * D * D * 3 + 4 * M * D * 5)
    psd = dict(preconditioner_form="psd", mlp_preconditioner_form="psd")
    assert 2 * folding_flops(model_config(**CEM, **low_rank, **ranks, **psd)) == folding_flops(
        symmetric
    )
    assert folding_flops(model_config(**CEM)) == 0


def test_other_steps_and_training():
    config = model_config(**CEM)
    longer = model_config(**CEM, steps=3, mlp_steps=4)
    assert flops_per_token(with_steps(config, 3, 4), J) == flops_per_token(longer, J)
    assert training_flops_per_token(config, J) == 3 * flops_per_token(config, J)
    assert forward_flops(config, J).total == sum(forward_flops(config, J))


def test_a_full_cem_layer_at_two_steps_costs_half_as_much_again_as_llamas():
    sizes = dict(dim=672, heads=8, mlp_dim=1792, layers=8, vocab_size=32_000)
    two = dict(steps=2, mlp_steps=2)
    cem = forward_flops(model_config(**CEM | sizes, **two), 2048)
    llama = forward_flops(model_config(**LLAMA | sizes), 2048)
    ratio = (cem.attention + cem.mlp) / (llama.attention + llama.mlp)
    assert ratio == pytest.approx(1.53, abs=0.005)


def counted_by_xla(config, batch, context):
    """Return XLA's FLOPs of a compiled forward pass, in which a loop's body counts once."""
    tokens = jax.ShapeDtypeStruct((batch, context), jnp.int32)
    forward = lambda parameters, tokens: pure.bind(config, parameters)(tokens)
    lowered = jax.jit(forward).lower(pure.abstract_parameters(config), tokens)
    return lowered.compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    "fields",
    [
        LLAMA,
        CEM,
        CEM | dict(diagonal="shared", update="closed_form"),
        CEM | dict(diagonal="shared", preconditioner="diagonal_low_rank", preconditioner_rank=4),
        CEM | dict(diagonal="shared", diagonal_in_update=True),
        CEM | dict(diagonal="per_head"),
        CEM | dict(diagonal="per_head", diagonal_in_update=True),
        CEM
        | dict(
            diagonal="shared",
            diagonal_in_update=True,
            preconditioner="diagonal_low_rank",
            preconditioner_rank=4,
        ),
    ],
    ids=lambda fields: "-".join(str(v) for v in fields.values() if isinstance(v, str | bool)),
)
def test_xla_counts_the_same(fields):
    sizes = dict(dim=256, mlp_dim=384, layers=1, vocab_size=256)
    config = model_config(
        **fields | sizes, implementation="dense", scan_layers=False, steps=1, mlp_steps=1
    )
    batch, context = 2, 128
    counted = counted_by_xla(config, batch, context)
    # dense attention computes all J² pairs: as if a token saw J positions, not (J + 1)/2
    ours = batch * context * flops_per_token(config, 2 * context - 1) + folding_flops(config)
    # XLA also counts elementwise operations
    assert 1.0 <= counted / ours < 1.03


def test_xla_counts_two_unrolled_steps():
    """Two sublayers of one step cost as much as one of two steps, plus a second set of keys."""
    sizes = dict(dim=256, mlp_dim=384, vocab_size=256)
    fixed = dict(implementation="dense", scan_layers=False, steps=1, mlp_steps=1)
    one, two = (model_config(**CEM | sizes | dict(layers=n), **fixed) for n in (1, 2))
    batch, context = 2, 128
    a_layer = counted_by_xla(two, batch, context) - counted_by_xla(one, batch, context)
    frame = 2 * batch * context * (256 * 256 + 256 * 384)  # keys and γ, computed once for all steps
    longer = model_config(**CEM | sizes | dict(layers=1), steps=2, mlp_steps=2)
    pairs = 2 * context - 1
    a_step = flops_per_token(longer, pairs) - flops_per_token(one, pairs)
    assert 1.0 <= (a_layer - frame) / (batch * context * a_step) < 1.03


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
        ("cpu", None),
        ("TPU v4 lite", None),
        ("NVIDIA H20", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peaks(kind, peak):
    assert peak_flops(kind) == peak


def test_mfu_is_of_all_devices_together():
    devices = [SimpleNamespace(device_kind="TPU v4")] * 4
    assert mfu(1e6, 550e6, devices) == pytest.approx(0.5)
    assert mfu(1e6, 550e6, [*devices, SimpleNamespace(device_kind="cpu")]) is None
    assert mfu(1e6, 550e6, jax.devices("cpu")) is None
    assert mfu(1e6, 550e6, []) is None

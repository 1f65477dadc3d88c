"""Parameters: their number, names, initial values and decay."""

import jax
import numpy as np
import pytest
from model_configs import full_config, model_config

from cem_jax.model import pure

SIZES = {
    "86m": dict(dim=672, layers=8, heads=8, mlp_dim=1792),
    "108m": dict(dim=672, layers=12, heads=12, mlp_dim=1792),
    "134m": dict(dim=768, layers=12, heads=12, mlp_dim=2048),
    "162m": dict(dim=864, layers=12, heads=12, mlp_dim=2304),
}
FULL = dict(preconditioner_rank=4, mlp_preconditioner_rank=16)
LLAMA = dict(kind="llama", position="rope")
KINDS = {
    "llama": lambda **sizes: model_config(**LLAMA, mlp_kind="gated", **sizes),
    "cem": lambda **sizes: full_config(**FULL, **sizes),
    "cem attention": lambda **sizes: model_config(
        diagonal="shared", self_bias=True, mlp_kind="gated", **sizes
    ),
    "cem mlp": lambda **sizes: model_config(**LLAMA, **sizes),
    "wide cem mlp": lambda **sizes: model_config(
        **LLAMA, **sizes | dict(mlp_dim=sizes["mlp_dim"] * 3 // 2)
    ),
}
TABLE = {
    "86m": (86_371_488, 70_082_272, 79_151_584, 76_737_696, 86_371_488),
    "108m": (108_052_896, 83_909_424, 97_223_088, 93_602_208, 108_052_896),
    "134m": (134_105_856, 102_384_528, 119_959_440, 115_231_488, 134_105_856),
    "162m": (162_813_024, 122_481_648, 144_907_632, 138_925_152, 162_813_024),
}


@pytest.mark.parametrize("size", SIZES)
def test_counts(size):
    counts = [pure.count(make(vocab_size=32_000, **SIZES[size])) for make in KINDS.values()]
    assert tuple(counts) == TABLE[size]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_every_dimension_has_a_name(make):
    sizes = dict(dim=24, layers=3, heads=2, mlp_dim=40, vocab_size=7)
    config = make(**sizes)
    named = {"layers": 3, "heads": 2, "head_dim": 12, "embed": 24, "vocab": 7}
    named["mlp"] = config.mlp.dim
    for path, info in infos(config).items():
        assert len(info.axes) == len(info.shape), path
        assert info.dtype == np.float32
        assert ("layers" in info.axes) == path.startswith("blocks.")
        for name, size in zip(info.axes, info.shape, strict=True):
            assert size == named.get(name, size), path


def infos(config):
    leaves = jax.tree_util.tree_leaves_with_path(pure.describe(config))
    return {".".join(key.key for key in path): info for path, info in leaves}


def test_matrices_decay_and_nothing_else():
    config = full_config(learn_step_size=True, mlp_learn_step_size=True, step_norm="separate")
    llama = model_config(**LLAMA, self_bias=True, mlp_kind="gated")
    last = lambda path: path.rpartition(".")[2]
    found = {last(p): i.decays for c in (config, llama) for p, i in infos(c).items()}
    matrices = "embedding head query key value output multiplier tied gate up down left right"
    others = "norm step_norm diagonal self_bias p eta"
    expected = dict.fromkeys(matrices.split(), True) | dict.fromkeys(others.split(), False)
    assert found == expected


def test_tied_embeddings_have_no_head():
    tied = pure.abstract_parameters(model_config(tie_embeddings=True))
    untied = pure.abstract_parameters(model_config())
    assert set(untied) - set(tied) == {"head"}


def test_init():
    """Parameters depend only on the key, vmapped or not, and each layer draws its own."""
    config = model_config(
        dim=16,
        diagonal="shared",
        self_bias=True,
        init_std=0.5,
        diagonal_init=0.25,
        learn_step_size=True,
        step_size=0.75,
    )
    draw = lambda seed: pure.initialise(config, jax.random.key(seed))
    plain = jax.jit(draw)(3)
    mapped = jax.jit(jax.vmap(draw))(np.array([2, 3]))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    jax.tree.map(lambda a, b: close(a, b[1]), plain, mapped)
    described = pure.abstract_parameters(config)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), plain) == jax.tree.map(
        lambda a: (a.shape, a.dtype), described
    )
    a = plain["blocks"]["attention"]
    assert np.all(a["diagonal"] == 0.25) and np.all(a["eta"] == 0.75) and np.all(a["norm"] == 1)
    assert not a["self_bias"].any()
    everything = [
        plain["embedding"],
        plain["head"],
        *(a[n][i] for n in ("query", "key") for i in (0, 1)),
    ]
    for index, matrix in enumerate(everything):
        assert 0.4 < np.std(matrix) < 0.6
        assert not any(np.array_equal(matrix, other) for other in everything[:index])
    assert not np.array_equal(mapped["embedding"][0], mapped["embedding"][1])

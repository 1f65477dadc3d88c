"""`cem inspect`: figures, table and errors."""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from cem_jax import cli
from cem_jax.aot.summary import cache_bytes_per_token, memory, notes, summarise, training
from cem_jax.commands.inspect import rendered
from cem_jax.config import load_config
from cem_jax.model import pure

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BASE = str(CONFIGS / "base.py")
SMALL = {
    "model.vocab_size": 64,
    "model.dim": 16,
    "model.layers": 2,
    "model.mlp.dim": 24,
    "data.context": 32,
    "train.global_batch": 4,
    "train.steps": 10,
}


def small(**overrides):
    return load_config(BASE, SMALL | {n.replace("__", "."): v for n, v in overrides.items()})


@functools.cache
def summary(**overrides):
    return summarise(small(**overrides))


def test_the_86m_models():
    found = summarise(load_config(str(CONFIGS / "cem_86m.py")))
    assert found["parameters"] == sum(found["parameters_by_module"].values()) == 70_082_272
    assert found["llama_twin"]["parameters"] == 86_371_488
    assert found["training"] == {
        "steps": 6590,
        "tokens": 6590 * 128 * 2048,
        "flops": 6590 * 128 * 2048 * found["training_flops_per_token"],
    }
    layer = 5 * 672**2 + 5 * 672 * 1792 + 2 * 3 * 672 * 2049 / 2
    assert found["flops_per_token"] == 2 * (8 * layer + 32_000 * 672)
    assert found["training_flops_per_token"] == 3 * found["flops_per_token"]
    # keys and h here, keys and values there, in bfloat16
    assert found["cache_bytes_per_token"] == 8 * 2 * 672 * 2
    assert found["llama_twin"]["cache_bytes_per_token"] == 8 * 2 * 672 * 2


def test_a_llama_is_its_own_twin():
    found = summarise(load_config(str(CONFIGS / "llama_86m.py")))
    assert found["llama_twin"] == {name: found[name] for name in found["llama_twin"]}
    assert found["notes"] == []


def test_without_a_diagonal_the_cache_holds_keys_only():
    model = small(model__attention__diagonal="none").model
    assert cache_bytes_per_token(model, "bfloat16") == 2 * 16 * 2


def test_reused_llama_layers_keep_a_cache_for_each_application():
    model = small(model__attention__kind="llama", model__attention__steps=3).model
    assert cache_bytes_per_token(model, "bfloat16") == 3 * 2 * 2 * 16 * 2


def test_memory_of_parameters_optimizer_and_gradients():
    once, accumulated = summary()["memory"], memory(small(train__microbatch=2))
    size = 4 * summary()["parameters"]
    assert (once["parameters"], once["optimizer"], once["gradients"]) == (size, 2 * size, size)
    assert accumulated["gradients"] == 2 * size  # one is the running sum
    tables = [rendered(summary()), rendered(summary(train__microbatch=2))]
    why = "gradients: a microbatch's and the sum"
    assert [why in table for table in tables] == [False, True]
    assert once["total"] == sum(v for name, v in once.items() if name != "total")


def test_activations_grow_with_the_batch_and_shrink_with_rematerialisation():
    sizes = [
        memory(small(data__context=256, **fields))["activations"]
        for fields in (
            dict(train__global_batch=8),
            dict(),
            dict(model__remat="dots"),
            dict(model__remat="full"),
        )
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.05)


def test_activations_are_what_the_compiled_step_holds():
    """Except the working memory of the backward pass, about that of a layer."""
    llama = dict(kind="llama", position="rope", steps=1, self_bias=False, implementation="dense")
    config = small(
        model__layers=8,
        model__mlp__kind="gated",
        model__mlp__steps=1,
        train__compute_dtype="float32",
        **{f"model__attention__{name}": value for name, value in llama.items()},
    )
    kept = memory(config)["activations"]

    def gradient(parameters, tokens):
        model = lambda p: pure.bind(config.model, p)(tokens, dtype=jnp.float32)
        return jax.grad(lambda p: jnp.square(model(p)).sum())(parameters)

    tokens = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    compiled = jax.jit(gradient).lower(pure.abstract_parameters(config.model), tokens).compile()
    assert 0.7 < compiled.memory_analysis().temp_size_in_bytes / kept < 1.5


def test_shardings_name_mesh_axes_for_every_dimension():
    shardings = summary()["shardings"]
    assert shardings["embedding"] == {
        "shape": [64, 16],
        "dtype": "float32",
        "partition": [["tensor"], ["fsdp"]],
        "bytes_per_device": 64 * 16 * 4,
    }
    for sharding in shardings.values():
        assert len(sharding["partition"]) == len(sharding["shape"])
    by_module = summary()["parameters_by_module"]
    assert {n: math.prod(s["shape"]) for n, s in shardings.items()} == by_module


# The axis of each dimension: t tensor, f fsdp, · none. In a block, stacked layers come first.
SPECS = {
    "cem_86m": {
        "blocks.attention.diagonal": "·f",
        "blocks.attention.key": "·t·f",
        "blocks.attention.norm": "·f",
        "blocks.attention.preconditioner.left": "·tf·",
        "blocks.attention.preconditioner.p": "·tf",
        "blocks.attention.preconditioner.right": "·tf·",
        "blocks.attention.query": "·t·f",
        "blocks.attention.self_bias": "·t",
        "blocks.mlp.multiplier": "·tf",
        "blocks.mlp.norm": "·f",
        "blocks.mlp.preconditioner.left": "·f·",
        "blocks.mlp.preconditioner.p": "·f",
        "blocks.mlp.preconditioner.right": "·f·",
        "blocks.mlp.tied": "·tf",
        "embedding": "tf",
        "head": "tf",
        "norm": "f",
    },
    "llama_86m": {
        "blocks.attention.key": "·t·f",
        "blocks.attention.norm": "·f",
        "blocks.attention.output": "·t·f",
        "blocks.attention.query": "·t·f",
        "blocks.attention.value": "·t·f",
        "blocks.mlp.down": "·tf",
        "blocks.mlp.gate": "·tf",
        "blocks.mlp.norm": "·f",
        "blocks.mlp.up": "·tf",
        "embedding": "tf",
        "head": "tf",
        "norm": "f",
    },
}


@pytest.mark.parametrize("name", SPECS)
def test_placement_of_every_parameter_and_moment(name):
    config = load_config(str(CONFIGS / f"{name}.py"), {"mesh.fsdp": 4, "mesh.tensor": 2})
    short = {"tensor": "t", "fsdp": "f", None: "·"}
    found = summarise(config, devices=16)
    assert found["mesh"] == {"data": 2, "fsdp": 4, "tensor": 2, "context": 1}
    shardings = found["shardings"]
    written = {
        name: "".join(short[axes[0] if axes else None] for axes in sharding["partition"])
        for name, sharding in shardings.items()
    }
    assert written == SPECS[name]
    for name, spec in written.items():
        ways = 4 ** spec.count("f") * 2 ** spec.count("t")
        assert shardings[name]["bytes_per_device"] * ways == 4 * math.prod(shardings[name]["shape"])


def test_impossible_device_counts(capsys):
    config = ["inspect", "--config", str(CONFIGS / "cem_86m.py")]
    assert cli.main([*config, "--devices", "12"]) == 2
    assert capsys.readouterr().err == (
        "cem: error: train.microbatch: 32 is not a multiple of mesh.data 12; no divisor of "
        "train.global_batch 128 is\n"
    )
    assert cli.main([*config, "--devices", "12", "--config.mesh.fsdp=8"]) == 2
    assert "needs a multiple of 8 devices; there are 12" in capsys.readouterr().err


def test_the_costly_combination_is_pointed_out():
    exact = dict(model__attention__diagonal_in_update=True)
    assert any("4 times the memory" in note for note in notes(small(**exact).model))
    shared = small(**exact, model__attention__preconditioner_heads="shared")
    assert not any("times the memory" in note for note in notes(shared.model))


def test_length_not_stated():
    assert training(small(train__steps=None)) is None


def test_float64_is_counted_as_such():
    double = summary(train__compute_dtype="float64")
    assert double["cache_bytes_per_token"] == 4 * summary()["cache_bytes_per_token"]
    assert double["memory"]["parameters"] == summary()["memory"]["parameters"]


def test_the_table_shows_every_figure():
    found = summarise(load_config(str(CONFIGS / "cem_86m.py")))
    text = rendered(found)
    for name, count in found["parameters_by_module"].items():
        assert name in text and f"{count:,}" in text
    for value in (86_371_488, found["flops_per_token"], found["cache_bytes_per_token"], 6590):
        assert f"{value:,}" in text
    assert max(map(len, text.splitlines())) < 120
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_command_line(capsys):
    flags = [f"--config.{name}={value}" for name, value in SMALL.items()]
    assert cli.main(["inspect", "--config", BASE, "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"parameters", "parameters_by_module", "flops_per_token", "llama_twin"} <= set(found)

    assert cli.main(["inspect", "--config", BASE, "--config.model.dim=33"]) == 2
    assert "model.attention.heads" in capsys.readouterr().err

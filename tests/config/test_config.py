"""The typed configuration: types, ranges, rules between fields, overrides, derived values."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from cem_jax.config import Config, differences, fields, leaves, load_config
from cem_jax.errors import UserError

BASE = str(Path(__file__).resolve().parents[2] / "configs" / "base.py")


def load(**overrides):
    return load_config(BASE, {name.replace("__", "."): value for name, value in overrides.items()})


def messages(*pairs, path=BASE):
    with pytest.raises(UserError) as caught:
        load_config(path, pairs)
    return caught.value.messages


@pytest.fixture
def config_file(tmp_path):
    """Return a function that writes a configuration file: the base, changed by statements."""

    def write(*statements):
        path = tmp_path / "mine.py"
        lines = ["from configs import base", "def get_config():", "  c = base.get_config()"]
        path.write_text("\n".join(lines + [f"  {s}" for s in statements] + ["  return c\n"]))
        return str(path)

    return write


def test_every_violation_is_reported_at_once():
    found = messages(
        ("model.attention.heads", "7"),
        ("model.dmi", "3"),
        ("optimizer.b1", "1"),
        ("seed", "nan"),
        ("train.microbatch", "48"),
        ("model.mlp.activation", "tanh"),
    )
    assert sorted(message.partition(":")[0] for message in found) == [
        "model.attention.heads",
        "model.dmi",
        "model.mlp.activation",
        "optimizer.b1",
        "seed",
        "train.microbatch",
    ]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("model.attention.heads", "7", "7 does not divide model.dim 256; nearest: 4, 8"),
        ("model.attention.heads", "300", "nearest: 256"),
        ("train.microbatch", "48", "48 does not divide train.global_batch 128; nearest: 32, 64"),
        ("mesh.fsdp", "-1", "mesh.data: only one axis may be -1, not also mesh.fsdp"),
        ("mesh.fsdp", "0", "mesh.fsdp: expected a positive number of devices or -1"),
        ("mesh.fsdp", "3", "train.global_batch: 128 is not a multiple of mesh.fsdp 3"),
        ("mesh.tensor", "8", "model.attention.heads: 4 is not a multiple of mesh.tensor 8"),
        ("mesh.tensor", "43", "model.attention.heads: 4 is not a multiple of mesh.tensor 43"),
        ("mesh.context", "3", "2048 is not a multiple of mesh.context 3 × 2 chunks, 6"),
        ("model.attention.tau", "0", "a decimal greater than 0, got '0'"),
        ("model.attention.tau", "nan", "a decimal greater than 0, got 'nan'"),
        ("model.attention.tau", "sqrt", "expected sqrt_head_dim, sqrt_model_dim or a decimal"),
        ("data.mixture", "a=1,b", "got 'b'"),
        ("data.mixture", "a=0", "weight greater than 0, got 'a=0'"),
        ("data.mixture", "=1", "got '=1'"),
        ("log.profile_steps", "5", "expected (first, last)"),
        ("log.profile_steps", "5,4", "first not after last"),
        ("log.compile_cache", "", "got an empty string"),
        ("eval.split", "../x", "expected a split's name"),
        ("model.attention.kinds", "cem", "no such field; did you mean model.attention.kind?"),
        ("learning_rate", "1", "did you mean optimizer.learning_rate?"),
        ("model.attention", "x", "a section, not a field; it holds kind, heads"),
        ("seed.x", "1", "no such field"),
        ("", "1", "no such field"),
    ],
)
def test_rule(name, text, words):
    assert any(words in message for message in messages((name, text)))


@pytest.mark.parametrize(
    ("fields", "nearest"),
    [
        ({"mesh.data": 3}, "mesh.data 2, 4 or train.global_batch 126, 129"),
        ({"mesh.data": 48, "mesh.fsdp": 4}, "mesh.data 32 or train.global_batch 192"),
        (
            {"mesh.fsdp": 16, "mesh.data": 16},
            "mesh.data 8 or mesh.fsdp 8 or train.global_batch 256",
        ),
        ({"mesh.data": 3, "train.microbatch": 16}, "mesh.data 2, 4"),
        ({"mesh.data": 8, "train.microbatch": 4}, "mesh.data 4 or train.microbatch 8"),
        ({"mesh.tensor": 8, "model.mlp.dim": 64}, "mesh.tensor 4 or model.attention.heads 8"),
        ({"mesh.tensor": 4, "model.mlp.dim": 66}, "mesh.tensor 2 or model.mlp.dim 64, 68"),
        ({"mesh.context": 3}, "mesh.context 2, 4 or data.context 2046, 2052"),
        ({"mesh.context": 2, "data.context": 63}, "mesh.context 1 or data.context 60, 64"),
        ({"mesh.context": 4, "data.context": 4}, "mesh.context 2 or data.context 8"),
    ],
)
def test_nearest_sizes_of_a_mesh(fields, nearest):
    (message,) = messages(*((name, str(value)) for name, value in fields.items()))
    assert message.partition("; nearest: ")[2] == nearest


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("seed", ["-1", "4294967296", "1.5", "true"]),
        ("model.vocab_size", ["1", "0", "2147483648"]),
        ("model.dim", ["0", "-256", "nan", "None"]),
        ("model.norm_eps", ["0", "2", "inf"]),
        ("model.attention.steps", ["0"]),
        ("model.attention.step_size", ["nan", "inf"]),
        ("model.attention.rope_base", ["0"]),
        ("model.attention.block_sizes", ["0,128", "128", "a,b"]),
        ("data.context", ["0"]),
        ("optimizer.learning_rate", ["0", "-0.1", "20", "None"]),
        ("optimizer.b2", ["1", "-0.1"]),
        ("optimizer.warmup_fraction", ["1.1", "-0.1"]),
        ("optimizer.clip_norm", ["0", "inf"]),
        ("train.steps", ["0", "-5", "0.5"]),
        ("checkpoint.every_minutes", ["0", "-1", "nan"]),
        ("mesh.data", ["-2"]),
    ],
)
def test_out_of_range(name, texts):
    for text in texts:
        (message,) = messages((name, text))
        assert message.startswith(name + ": "), (name, text)


def test_no_numeric_field_takes_nan_or_infinity():
    for name in fields():
        if name in ("data.path", "log.compile_cache", "eval.split"):
            continue  # any text is valid
        for text in ("nan", "inf"):
            assert messages((name, text))[0].startswith(name + ":"), name


@pytest.mark.parametrize("value", ["'many'", "2.5", "True", "[1]"])
def test_the_type_is_checked_after_none_was_assigned(config_file, value):
    path = config_file("c.train.steps = None", f"c.train.steps = {value}")
    (message,) = messages(path=path)
    assert "steps" in message
    assert "int" in message


def test_a_replaced_field_of_the_wrong_type(config_file):
    path = config_file("del c.model.dim", "c.model.dim = 'wide'", "del c.seed", "c.seed = None")
    assert messages(path=path) == (
        "seed: expected an integer, got None",
        "model.dim: expected an integer, got 'wide' (of type str)",
    )


def test_fields_added_and_removed_in_a_file(config_file):
    path = config_file("c.optimizer.lerning_rate = 0.1", "del c.eval.split", "c.extra = 1")
    found = "\n".join(messages(path=path))
    assert "optimizer.lerning_rate: no such field; did you mean optimizer.learning_rate?" in found
    assert "eval.split: missing" in found
    assert "extra: no such field" in found


def test_numpy_scalars_in_a_replaced_section():
    config = load_config(BASE, {"train.steps": 2, "model.tie_embeddings": np.bool_(True)})
    train = dataclasses.replace(config.train, steps=np.int64(2), stall_minutes=np.float32(30))
    optimizer = dataclasses.replace(config.optimizer, learning_rate=np.float64(0.5))
    changed = dataclasses.replace(config, train=train, optimizer=optimizer)
    assert type(changed.train.steps) is int and type(changed.train.stall_minutes) is float
    assert Config.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed
    with pytest.raises(UserError, match=r"train\.steps: expected an integer or None, got 2\.5"):
        dataclasses.replace(config, train=dataclasses.replace(train, steps=np.float32(2.5)))


def test_a_section_replaced_by_a_value(config_file):
    path = config_file("del c.model.mlp", "c.model.mlp = 3")
    (message,) = messages(path=path)
    assert message.startswith("model.mlp: a section, not a field; it holds kind, dim, steps")


def test_an_override_repairs_the_file(config_file):
    path = config_file("c.model.attention.heads = 7")
    assert load_config(path, [("model.attention.heads", "8")]).model.attention.heads == 8


def test_an_invalid_field_does_not_trigger_rules_about_it():
    assert len(messages(("model.attention.heads", "x"), ("model.dim", "255"))) == 1


def test_the_last_override_wins_and_values_may_be_python():
    assert load_config(BASE, [("seed", "1"), ("seed", "2")]).seed == 2
    assert load(model__attention__block_sizes=(16, 32)).model.attention.block_sizes == (16, 32)


def test_setting_one_of_two_alternatives_unsets_the_other(config_file):
    path = config_file("c.train.tokens = 10**9", "c.data.path = 'here'")
    c = load_config(path, {"train.steps": "5", "data.mixture": "a=1,b=0.5"})
    assert (c.train.steps, c.train.tokens, c.data.path) == (5, None, "")
    assert c.data.weights == {"a": 1.0, "b": 0.5}
    assert load_config(path).data.weights == {"here": 1.0}
    both = messages(("train.steps", "5"), ("train.tokens", "6"), path=path)
    assert both == ("train.steps: set it (5) or train.tokens (6), not both; set the other to None",)


def test_rope_needs_an_even_head_dimension():
    (message,) = messages(("model.attention.position", "rope"), ("model.dim", "12"))
    assert "model.dim 12 / model.attention.heads 4 is 3" in message
    assert load(model__dim="12").model.head_dim == 3


def test_the_exact_update_needs_a_diagonal_only_in_a_cem_layer():
    pairs = [("model.attention.diagonal_in_update", "true"), ("model.attention.diagonal", "none")]
    assert messages(*pairs)[0].startswith("model.attention.diagonal_in_update: ")
    load_config(BASE, [*pairs, ("model.attention.kind", "llama")])


def test_tau():
    assert load().model.tau == math.sqrt(64)
    assert load(model__attention__tau="sqrt_model_dim").model.tau == math.sqrt(256)
    assert load(model__attention__tau="2.5").model.tau == 2.5


def test_duration():
    assert load(train__steps="7").total_steps == 7
    assert load(train__tokens="1").total_steps == 1
    assert load(train__tokens=str(128 * 2048 * 10 - 1000)).total_steps == 10
    assert load().tokens_per_step == 128 * 2048
    with pytest.raises(UserError, match=r"train\.steps: set it, or train\.tokens"):
        _ = load().total_steps


def test_accumulation():
    assert load().train.accumulation == 1
    assert load(train__microbatch="32").train.accumulation == 4


def test_json_round_trip():
    c = load(log__profile_steps="3,5", data__mixture="a=1", model__attention__block_sizes="8,16")
    again = Config.from_dict(json.loads(json.dumps(c.to_dict(), allow_nan=False)))
    assert again == c
    assert hash(again) == hash(c)
    assert Config.from_dict(leaves(c)) == c
    assert differences(c, again) == {}


def test_differences_are_keyed_by_field():
    a, b = load(), load(model__dim="512", train__steps="3")
    assert differences(a, b) == {"model.dim": (256, 512), "train.steps": (None, 3)}


def test_from_dict_checks():
    values = load().to_dict()
    values["model"]["attention"]["heads"] = 7
    with pytest.raises(UserError, match="does not divide"):
        Config.from_dict(values)
    with pytest.raises(UserError, match="seed: missing"):
        Config.from_dict({})


def test_replacing_a_field_checks_again():
    c = load()
    with pytest.raises(UserError, match="does not divide"):
        dataclasses.replace(c, model=dataclasses.replace(c.model, dim=255))
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.seed = 1

"""Messages for names that are not fields."""

import pytest

from cem_jax.config import fields
from cem_jax.config.names import SYNONYMS, unknown


def suggested(name):
    _, found, hint = unknown(name, fields()).partition("; did you mean ")
    return hint.removesuffix("?").split(" or ") if found else []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model.depth", ["model.layers"]),
        ("n_layer", ["model.layers"]),
        ("model.d_model", ["model.dim"]),
        ("model.mlp.hidden_size", ["model.mlp.dim"]),
        ("model.num_heads", ["model.attention.heads"]),
        ("optimizer.lr", ["optimizer.learning_rate"]),
        ("train.batch_size", ["train.global_batch"]),
        ("train.max_steps", ["train.steps"]),
        ("model.max_seq_len", ["data.context"]),
        ("model.T", ["model.attention.steps", "model.mlp.steps"]),
        ("eval.batch", ["eval.batches"]),
    ],
)
def test_other_programs_names(name, meant):
    assert suggested(name) == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model.layer_s", ["model.layers"]),
        ("modle.layers", ["model.layers"]),
        ("model.atention.kind", ["model.attention.kind"]),
        ("model.steps", ["model.attention.steps", "model.mlp.steps"]),
        ("mesh.fdsp", ["mesh.fsdp"]),
        ("learning_rate", ["optimizer.learning_rate"]),
    ],
)
def test_near_names(name, meant):
    assert suggested(name) == meant


@pytest.mark.parametrize("name", ["model.banana", "model.dropout", "train.epochs", "x", "", "."])
def test_nothing_is_near(name):
    assert unknown(name, fields()) == f"{name}: no such field"


def test_synonyms_belong_to_fields_and_are_not_fields():
    assert set(SYNONYMS) <= set(fields())
    ends = {field.rpartition(".")[2] for field in fields()}
    assert not ends & {word for words in SYNONYMS.values() for word in words}

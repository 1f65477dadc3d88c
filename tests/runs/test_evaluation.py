"""`cem eval` and validation: every target counts once, for any batch; and refusals."""

import json
import math
import shutil
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_run import (
    CONTEXT,
    sentences,
    tiny_config,
    tiny_dataset,
    tiny_parameters,
    tiny_tokenizer,
    write_run,
)

from cem_jax.cli import main
from cem_jax.commands.eval import print_result
from cem_jax.config import with_steps
from cem_jax.data.corpus.tokenizer_training import train_model
from cem_jax.data.dataset.store import open_dataset
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.evaluation import evaluate
from cem_jax.sharding.mesh import make_mesh
from cem_jax.train.evaluator import Evaluator

KEYS = {"loss", "perplexity", "bits_per_byte", "tokens", "bytes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tokenizer, dataset/ and run/, whose checkpoints 3 and 7 differ."""
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def dataset(folder, tokenizer):
    return tiny_dataset(folder / "dataset", tokenizer)


@pytest.fixture(scope="module")
def config(dataset):
    return tiny_config(dataset)


@pytest.fixture(scope="module")
def run_directory(folder, config, tokenizer):
    steps = {step: tiny_parameters(config, seed=step) for step in (3, 7)}
    return write_run(folder / "run", config, tokenizer, steps)


def oracle(config, parameters, path, split="validation", limit=None, model=None):
    """Return (Σ nats, targets), window by window, from the model's own logits."""
    (shard,) = (path / split).glob("tokens-*.npy")
    stream = np.load(shard).astype(np.int32)
    starts = range(0, len(stream) - 1, CONTEXT)[:limit]
    windows = np.zeros((len(starts), CONTEXT + 1), np.int32)
    for window, start in zip(windows, starts, strict=True):
        piece = stream[start : start + CONTEXT + 1]
        window[: len(piece)] = piece
    forward = jax.jit(lambda p, tokens: pure.bind(model or config.model, p)(tokens))
    logits = np.asarray(forward(parameters, windows[:, :-1]), np.float64)
    nats = []
    for row, start, window in zip(logits, starts, windows, strict=True):
        for position in range(min(CONTEXT, len(stream) - 1 - start)):
            values, target = row[position], window[position + 1]
            nats.append(np.log(np.exp(values - values.max()).sum()) + values.max() - values[target])
    return sum(nats), len(nats)


def test_the_whole_split_each_target_once(run_directory, config, dataset, capsys):
    result = evaluate(run_directory)
    nats, targets = oracle(config, tiny_parameters(config, seed=7), dataset)
    size = sum(len(text.encode()) for text in sentences(25, seed=25))
    assert KEYS | {"step", "split"} <= set(result)
    assert (result["step"], result["split"]) == (7, "validation")
    assert (result["tokens"], result["bytes"]) == (targets, size)
    assert targets == open_dataset(dataset).splits["validation"].tokens - 1
    assert result["loss"] == pytest.approx(nats / targets, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert capsys.readouterr().out == ""


def test_the_batch_does_not_matter(run_directory):
    one, many = (evaluate(run_directory, batch=batch) for batch in (1, 7))
    assert one["tokens"] == many["tokens"]
    assert one["loss"] == pytest.approx(many["loss"], rel=1e-6)


def test_step_split_and_steps_of_recursion(run_directory, config, dataset):
    steps = dict(attention_steps=1, mlp_steps=3)
    result = evaluate(run_directory, step=3, split="train", **steps)
    model = with_steps(config.model, attention=1, mlp=3)
    nats, targets = oracle(config, tiny_parameters(config, seed=3), dataset, "train", model=model)
    assert result["step"] == 3
    assert result["loss"] == pytest.approx(nats / targets, rel=1e-5)


def test_limited_validation_counts_no_bytes(config, dataset):
    parameters = tiny_parameters(config)
    evaluator = Evaluator(config, open_dataset(dataset), "validation", limit=2, batch=3)
    result = evaluator(parameters)
    windows = 2 * config.train.global_batch + 1  # rounded up to batches of 3
    assert result["tokens"] == windows * CONTEXT
    assert result["bits_per_byte"] is None and result["bytes"] is None
    nats, targets = oracle(config, parameters, dataset, limit=windows)
    assert result["loss"] == pytest.approx(nats / targets, rel=1e-5)
    whole, common = evaluator.with_common(parameters, whole=True)
    assert whole["tokens"] > result["tokens"] and common == result["loss"]
    generous = Evaluator(config, open_dataset(dataset), "validation", limit=10_000)(parameters)
    assert generous["bits_per_byte"] is not None


def test_no_bits_per_byte_are_claimed_where_pieces_are_unknown(config, dataset, capsys):
    opened = open_dataset(dataset)
    lost = replace(opened.splits["validation"], unknown=3)
    opened = replace(opened, splits=opened.splits | {"validation": lost})
    result = Evaluator(config, opened, "validation", batch=2)(tiny_parameters(config))
    assert result["bits_per_byte"] is None and result["unknown"] == 3
    print_result(result | {"split": "validation", "step": 3, "seconds": 1}, sys.stdout)
    assert "no bits per byte: 3 tokens are unknown pieces" in capsys.readouterr().out


def test_it_compiles_once(config, dataset, monkeypatch):
    compiled = []
    compile_lowered = jax.stages.Lowered.compile

    def counting(self, *options, **more):
        compiled.append(self)
        return compile_lowered(self, *options, **more)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counting)
    evaluator = Evaluator(config, open_dataset(dataset), "validation")
    reported = []
    first = evaluator(tiny_parameters(config, seed=1), reported.append)
    second = evaluator(tiny_parameters(config, seed=2))
    assert first["loss"] != second["loss"]
    assert len(compiled) == 1
    assert reported == list(range(1, evaluator.batches() + 1))


def test_on_a_mesh(config, dataset):
    plain = Evaluator(config, open_dataset(dataset), "validation")
    meshed = Evaluator(config, open_dataset(dataset), "validation", mesh=make_mesh({"data": -1}))
    parameters = tiny_parameters(config)
    assert meshed(parameters)["loss"] == pytest.approx(plain(parameters)["loss"], rel=1e-6)


def test_documents_kept_apart(dataset):
    masked = tiny_config(dataset, data__document_mask=True)
    parameters = tiny_parameters(masked)
    a, b = (
        Evaluator(c, open_dataset(dataset), "validation")(parameters)
        for c in (masked, tiny_config(dataset))
    )
    assert a["tokens"] == b["tokens"] and a["loss"] != b["loss"]


def test_a_mixture_is_reported_by_source(tmp_path, tokenizer, dataset):
    other = tiny_dataset(tmp_path / "other", tokenizer, seed=9)
    mixture = (f"{dataset}=1", f"{other}=3")
    config = tiny_config(data__mixture=mixture)
    parameters = tiny_parameters(config)
    result = evaluate(write_run(tmp_path / "run", config, tokenizer, {1: parameters}))
    alone = [Evaluator(config, open_dataset(d), "validation")(parameters) for d in (dataset, other)]
    for values, path in zip(alone, (dataset, other), strict=True):
        assert result["sources"][str(path)]["loss"] == pytest.approx(values["loss"], rel=1e-6)
    tokens = sum(values["tokens"] for values in alone)
    nats = sum(values["loss"] * values["tokens"] for values in alone)
    assert result["tokens"] == tokens
    assert result["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert result["bytes"] == sum(values["bytes"] for values in alone)


def test_the_command_prints_its_result(run_directory, capfd):
    assert main(["eval", "--workdir", str(run_directory), "--json"]) == 0
    printed = capfd.readouterr()
    assert set(json.loads(printed.out)) >= KEYS
    assert "bits per byte" in printed.err
    assert main(["eval", "--workdir", str(run_directory)]) == 0
    assert "bits per byte" in capfd.readouterr().out


def test_bits_per_byte_of_a_uniform_model(folder, config, dataset, tokenizer):
    parameters = tiny_parameters(config)
    parameters["head"] = parameters["head"] * 0
    result = Evaluator(config, open_dataset(dataset), "validation")(parameters)
    expected = result["tokens"] * math.log2(config.model.vocab_size) / result["bytes"]
    assert result["bits_per_byte"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_a_split_smaller_than_a_window(tmp_path, tokenizer, dataset, training):
    config = tiny_config(dataset, data__context=100_000)
    with pytest.raises(UserError, match=r"tokens are fewer than one window of .*100001"):
        if training:
            Evaluator(config, open_dataset(dataset), "validation")
        else:
            parameters = {1: tiny_parameters(config)}
            evaluate(write_run(tmp_path / "run", config, tokenizer, parameters))


def test_an_unknown_split_lists_the_existing_ones(run_directory):
    with pytest.raises(UserError, match=r"no split 'test'; it has train, validation"):
        evaluate(run_directory, split="test")


def test_data_of_another_tokenizer_is_refused_with_both_hashes(tmp_path, tokenizer, capsys):
    other = Tokenizer(train_model(sentences(200, seed=5), 320))
    config = tiny_config(tiny_dataset(tmp_path / "dataset", other))
    run = write_run(tmp_path / "run", config, tokenizer, {1: tiny_parameters(config)})
    assert main(["eval", "--workdir", str(run)]) == 2
    message = capsys.readouterr().err
    assert tokenizer.hash in message and other.hash in message and "Traceback" not in message


def test_data_of_another_separator_is_refused(tmp_path, tokenizer):
    config = tiny_config(tiny_dataset(tmp_path / "dataset", tokenizer, separator="both"))
    run = write_run(tmp_path / "run", config, tokenizer, {1: tiny_parameters(config)})
    with pytest.raises(UserError, match="separator"):
        evaluate(run)


def test_missing_data(tmp_path, tokenizer):
    config = tiny_config(tmp_path / "gone")
    run = write_run(tmp_path / "run", config, tokenizer, {1: tiny_parameters(config)})
    with pytest.raises(UserError, match=r"gone does not exist"):
        evaluate(run)


def test_data_names_where_the_dataset_is_now_or_another(
    run_directory, dataset, tokenizer, tmp_path, capsys
):
    here = evaluate(run_directory)
    moved = tmp_path / "moved"
    shutil.copytree(dataset, moved)
    other = tiny_dataset(tmp_path / "other", tokenizer, seed=5)
    assert main(["eval", "--workdir", str(run_directory), "--data", str(moved), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == here["loss"] and found["tokens"] == here["tokens"]
    assert evaluate(run_directory, data=str(other))["loss"] != here["loss"]
    foreign = tiny_dataset(tmp_path / "foreign", Tokenizer(train_model(sentences(300, 9), 300)))
    with pytest.raises(UserError, match="tokenizer"):
        evaluate(run_directory, data=str(foreign))
    with pytest.raises(UserError, match="absent"):
        evaluate(run_directory, data=str(tmp_path / "absent"))

"""Metrics per source when training on a mixture."""

import io
import json
from pathlib import Path

import pytest
from tiny import WORDS, tiny_config, tiny_dataset

from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.dataset.mixture import open_mixture
from cem_jax.runs.metrics import read_metrics
from cem_jax.runs.training import train


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Two sources, one much larger than the other, with held-out documents of both."""
    folder = tmp_path_factory.mktemp("sources")
    model = tiny_dataset(folder).parent / "tokenizer.model"
    for split, count in (("train", 40), ("validation", 8)):
        (folder / "rows" / split).mkdir(parents=True)
        rows = []
        for i in range(count):
            text = " ".join(WORDS[(i * 7 + k) % len(WORDS)] for k in range(60))
            rows.append({"text": text, "meta": {"set": "small" if i % 4 == 0 else "large"}})
        file = folder / "rows" / split / "a.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
    prepare([str(folder / "rows")], model, folder / "named", source_field="meta.set")
    return folder / "named"


def test_tokens_and_epochs_of_each_source_are_written(dataset, tmp_path):
    entries = (f"{dataset}#small=1", f"{dataset}#large=1")
    fields = dict(model__layers=1, train__steps=6, checkpoint__every=3)
    config = tiny_config(data__mixture=entries, **fields)
    train(config, tmp_path / "run", stream=io.StringIO())
    lines = read_metrics(tmp_path / "run")
    small, large = names = open_mixture(entries).names
    for line in (line for line in lines if line["kind"] == "train"):
        sources = line["sources"]
        assert set(sources) == set(names)
        assert sum(source["tokens"] for source in sources.values()) == line["tokens"]
        half = line["tokens"] / 2
        assert abs(sources[small]["tokens"] - half) <= config.data.context
        assert sources[small]["epoch"] > 2 * sources[large]["epoch"] > 0
    evaluated = [line for line in lines if line["kind"] == "eval"][-1]
    assert set(evaluated["sources"]) == set(names)
    assert evaluated["tokens"] == sum(s["tokens"] for s in evaluated["sources"].values())
    assert all(source["bits_per_byte"] > 0 for source in evaluated["sources"].values())


def test_a_dataset_trained_on_whole_is_evaluated_by_source(dataset, tmp_path):
    config = tiny_config(data__path=str(dataset), model__layers=1, train__steps=2)
    train(config, tmp_path / "run", stream=io.StringIO())
    *trained, evaluated = read_metrics(tmp_path / "run")
    assert "sources" not in trained[0]
    assert set(evaluated["sources"]) == {f"{dataset}#small", f"{dataset}#large"}

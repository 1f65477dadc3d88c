"""A run and a dataset of an earlier version still open, evaluate and resume (tests/fixtures)."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from cem_jax import cli
from cem_jax.data.dataset.checks import check_dataset
from cem_jax.runs import training
from cem_jax.runs.directory import read_config
from cem_jax.runs.metrics import read_metrics
from cem_jax.storage.paths import place

FIXTURES = Path(__file__).parents[1] / "fixtures"
EVALUATED = 5.583013274258948
RESUMED = [5.602786064147949, 5.58271598815918]
EVALUATED_AT_THE_END = 5.563584466375227


@pytest.fixture
def run(tmp_path):
    """A copy of the old run, whose configuration names the old dataset's present path."""
    shutil.copytree(FIXTURES / "old_run", tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    values = json.loads(path.read_text())
    values["data"]["path"] = str(FIXTURES / "old_dataset")
    path.write_text(json.dumps(values))
    return tmp_path / "run"


def test_the_dataset_is_whole():
    description = check_dataset(FIXTURES / "old_dataset")
    assert {name: split["tokens"] for name, split in description["splits"].items()} == {
        "train": 3665,
        "validation": 895,
    }


def test_it_evaluates_to_the_same_loss(run, capsys):
    assert cli.main(["eval", "--workdir", str(run), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["loss"] == pytest.approx(EVALUATED, rel=1e-6)
    assert "warning" not in told.err


def test_it_resumes_to_the_same_losses(run):
    config = read_config(place(run))
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=6))
    training.train(longer, run)
    lines = [line for line in read_metrics(run) if line["step"] > 4]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses == pytest.approx(RESUMED, rel=1e-5)
    assert lines[-1]["kind"] == "eval"
    assert lines[-1]["loss"] == pytest.approx(EVALUATED_AT_THE_END, rel=1e-5)

"""A tokenizer and corpora made of the standard library's own sources."""

import inspect
import json
import textwrap
from pathlib import Path

import pytest
from corpora import MakeDataset, write_jsonl

from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.corpus.tokenizer_training import train_model
from cem_jax.data.dataset.store import Dataset, open_dataset
from cem_jax.data.dataset.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Return real text: the source of every function in textwrap, json and inspect."""
    modules = (textwrap, json, inspect)
    functions = [f for m in modules for _, f in inspect.getmembers(m, inspect.isfunction)]
    return [inspect.getsource(function) for function in functions]


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Tokenizer:
    return Tokenizer(train_model(texts, 512))


@pytest.fixture(scope="session")
def model_file(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(tokenizer.model_bytes)
    return path


@pytest.fixture
def make_dataset(tmp_path: Path, model_file: Path) -> MakeDataset:
    """Return make_dataset(train texts, validation texts, **prepare options) -> Dataset."""
    made = 0

    def make(train: list[str], validation: list[str] = (), **options) -> Dataset:
        nonlocal made
        made += 1
        root = tmp_path / f"corpus{made}"
        write_jsonl(root / "train" / "a.jsonl", train)
        if validation:
            write_jsonl(root / "validation" / "a.jsonl", list(validation))
        options.setdefault("validation_fraction", 0.0)
        prepare([str(root)], model_file, tmp_path / f"dataset{made}", **options)
        return open_dataset(tmp_path / f"dataset{made}")

    return make

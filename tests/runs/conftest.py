"""Fixtures of the training tests."""

import pytest
from tiny import tiny_dataset

from cem_jax.runs.checkpoints import Writer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A tiny dataset with a train and a validation split."""
    return tiny_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def lines():
    return []


@pytest.fixture
def opened(tmp_path, lines):
    """Open checkpointers below tmp_path, and close them all."""
    made = []

    def open_one(keep=3, keep_best=True, keep_every=None):
        kept = dict(keep=keep, keep_best=keep_best, keep_every=keep_every)
        made.append(Writer(tmp_path / "c", **kept, report=lines.append))
        return made[-1]

    yield open_one
    for one in made:
        one.close()

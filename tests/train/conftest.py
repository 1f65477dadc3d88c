"""Fixtures of the checkpoint tests."""

import pytest

from cem_jax.train.checkpoint import Checkpointer


@pytest.fixture
def lines():
    return []


@pytest.fixture
def opened(tmp_path, lines):
    """Opens checkpointers below tmp_path and closes them all."""
    made = []

    def open_one(keep=3, keep_best=True):
        made.append(
            Checkpointer(tmp_path / "c", keep=keep, keep_best=keep_best, report=lines.append)
        )
        return made[-1]

    yield open_one
    for one in made:
        one.close()

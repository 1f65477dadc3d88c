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

    def open_one(keep=3, keep_best=True, keep_every=None):
        kept = dict(keep=keep, keep_best=keep_best, keep_every=keep_every)
        made.append(Checkpointer(tmp_path / "c", **kept, report=lines.append))
        return made[-1]

    yield open_one
    for one in made:
        one.close()

"""Compare a stopped or killed run with an undisturbed one."""

import jax
import numpy as np

from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.metrics import read_metrics
from cem_jax.train.setup import abstract_state

TIMING = {"tokens_per_second", "step_seconds", "data_wait_fraction"}


def final_state(workdir, config):
    """Return the state of the newest checkpoint, on one device."""
    mesh = jax.make_mesh((1, 1, 1, 1), ("data", "fsdp", "tensor", "context"))
    with Writer(workdir / "checkpoints", keep=2, keep_best=True) as checkpoints:
        state, _ = checkpoints.restore(None, abstract_state(config, mesh))
    return jax.device_get(state)


def without_timing(workdir):
    return [
        {key: value for key, value in line.items() if key not in TIMING}
        for line in read_metrics(workdir)
    ]


def assert_same_run(ours, theirs, config):
    """Check that states are bit-identical, and metrics equal, with each step once."""
    pairs = zip(
        jax.tree.leaves(final_state(ours, config)),
        jax.tree.leaves(final_state(theirs, config)),
        strict=True,
    )
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)
    assert without_timing(ours) == without_timing(theirs)
    with (
        Writer(ours / "checkpoints", keep=2, keep_best=True) as one,
        Writer(theirs / "checkpoints", keep=2, keep_best=True) as other,
    ):
        assert one.best_step() == other.best_step()

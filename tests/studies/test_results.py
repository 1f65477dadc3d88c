"""Decisions by seeds: which arms are compared, and when a difference counts."""

import numpy as np
import pytest
from scipy import stats
from tiny_figure import row, write_figure

from cem_jax.studies.figures.grid import read_sweep, runs_of
from cem_jax.studies.figures.results import differences, half_interval, points_of

STEPS = (
    "two = cem.copy_and_resolve_references(); two.model.attention.steps = 2; "
    "arms[1:] = [Arm('T = 1', cem, 'CEM', 1), Arm('T = 2', two, 'CEM', 2)]"
)


def compared(path, loss, seeds=(0, 1, 2)):
    """Return {(arm, against): result}; `loss(arm, seed)` is None for a missing run."""
    sweep = read_sweep(path)
    losses = [(run, loss(run.uses[0].arm, run.seed)) for run in runs_of([sweep], seeds)]
    rows = [row(run, 1.0, loss=value) for run, value in losses if value is not None]
    found = differences(sweep, points_of(sweep, rows))
    return {(pair.arm, pair.against): pair for pair in found}


def test_the_interval_is_scipys_own():
    values = np.random.default_rng(0).normal(1.0, 0.5, 5)
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert half_interval(list(values)) == pytest.approx((high - low) / 2)


def test_what_seeds_have_in_common_cancels(tmp_path):
    """Seeds differ by whole nats, arms by a hundredth, always the same way."""
    noise = {0: 0.000, 1: 0.001, 2: -0.001}
    path = write_figure(tmp_path)
    loss = lambda arm, seed: 3.0 + seed + (arm == "CEM") * (0.01 + noise[seed])
    (pair,) = compared(path, loss).values()
    assert pair.difference == pytest.approx(0.01)
    assert (pair.seeds, pair.verdict) == (3, "worse")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([-0.010, -0.011, -0.009], "better"),
        ([0.02, -0.01, 0.03], "undecided"),  # the mean is positive, its interval contains 0
        ([0.02], "undecided"),  # one seed decides nothing
    ],
)
def test_verdicts(values, verdict, tmp_path):
    path = write_figure(tmp_path)
    loss = lambda arm, seed: 3.0 + (values[seed] if arm == "CEM" else 0.0)
    (pair,) = compared(path, loss, range(len(values))).values()
    assert pair.verdict == verdict


def test_seeds_that_only_one_arm_has_are_left_out(tmp_path):
    path = write_figure(tmp_path)
    loss = lambda arm, seed: None if (arm, seed) == ("CEM", 1) else 3.0 + 9.0 * (seed == 1)
    (pair,) = compared(path, loss).values()
    assert (pair.seeds, pair.difference) == (2, 0.0)


def test_which_arms_are_compared(tmp_path):
    loss = lambda arm, seed: 3.0
    steps = compared(write_figure(tmp_path, "steps", plot="steps", more=STEPS), loss)
    assert set(steps) == {("T = 1", "Llama"), ("T = 2", "Llama"), ("T = 2", "T = 1")}
    third = "third = cem.copy_and_resolve_references(); third.model.attention.diagonal = 'none'; "
    third += "arms.append(Arm('third', third))"
    arms = compared(write_figure(tmp_path, "arms", plot="arms", more=third), loss)
    assert set(arms) == {("CEM", "Llama"), ("third", "Llama"), ("third", "CEM")}
    series = third.replace("Arm('third', third)", "Arm('third', third, 'its own')")
    apart = compared(write_figure(tmp_path, "apart", plot="arms", more=series), loss)
    assert set(apart) == {("CEM", "Llama"), ("third", "Llama")}

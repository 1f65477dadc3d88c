"""Arms over model sizes: multipliers with a known answer, and reports on too little data."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from scipy import stats
from tiny_figure import report, row

from cem_jax.studies.figures import tables
from cem_jax.studies.figures.grid import read_sweep, runs_of
from cem_jax.studies.figures.results import points_of
from cem_jax.studies.figures.scaling import fit, paired, pooled, scaling, seeds_to_decide

FILE = Path(__file__).resolve().parents[2] / "configs" / "paper" / "ours_recursion.py"
SIZES = ("0.3m", "0.6m", "1.3m", "2.6m")
FLOPS = dict(zip(SIZES, (8e12, 5e13, 2e14, 8.5e14), strict=True))
ARM = "CEM attention, T = 2"
DEARER, FEWER = 1.25, 0.8  # the arm's FLOPs and parameters, as shares of Llama's


def law(flops):
    return 1.5 + 2.0 * (flops / 1e13) ** -0.1


def parameters(flops):
    """Return the parameters as on the ladder, where FLOPs are about 6 · 20 · parameters²."""
    return (flops / 120) ** 0.5


@pytest.fixture(scope="module")
def figure():
    """Return `ours_recursion` with two arms, at the given sizes and rates."""
    sweep = read_sweep(str(FILE), "ladder")
    keep = lambda arms: [arm for arm in arms if arm.name in ("Llama", ARM)]

    def made(sizes=SIZES, rates=sweep.rates):
        arms = {size: keep(sweep.arms[size]) for size in sizes}
        return dataclasses.replace(sweep, arms=arms, rates=rates)

    return made


def rows_of(sweep, loss, seeds=(0,)):
    """Return the rows of all runs; `loss(size, arm, rate, seed)` is None for a missing run."""
    found = []
    for run in runs_of([sweep], seeds):
        use = run.uses[0]
        value = loss(run.size, use.arm, use.rate, run.seed)
        if value is not None:
            llama = use.arm == "Llama"
            flops = FLOPS[run.size]
            fields = {
                "loss": value,
                "training_flops": flops * (1 if llama else DEARER),
                "parameters": parameters(flops) * (1 if llama else FEWER),
                "seconds": flops / 1e11 * (1 if llama else DEARER),
            }
            found.append(row(run, math.exp(value), **fields))
    return found


def worth(multiplier, best=1.0, noise=lambda arm, seed: 0.0):
    """Return losses of an arm whose best is Llama's at `multiplier` times the arm's FLOPs."""

    def loss(size, arm, rate, seed):
        flops = FLOPS[size] * (1 if arm == "Llama" else DEARER * multiplier)
        off = 0.01 * math.log(rate / (1 if arm == "Llama" else best)) ** 2
        return law(flops) + off + noise(arm, seed)

    return loss


def compared(sweep, loss, seeds=(0,)):
    return scaling(sweep, points_of(sweep, rows_of(sweep, loss, seeds)))


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("multiplier", [0.7, 1.0, 1.5])
def test_an_arm_as_good_as_llama_at_a_multiple_of_its_flops(multiplier, count, figure):
    found = compared(figure(SIZES[:count]), worth(multiplier))
    assert len(found.comparisons) == count
    for one in found.comparisons:
        llama = FLOPS[one.size]
        assert one.compute_multiplier.value == pytest.approx(multiplier, rel=1e-3)
        n = parameters(DEARER * multiplier * llama) / (FEWER * parameters(llama))
        assert one.parameter_multiplier.value == pytest.approx(n, rel=1e-3)
        equal = law(DEARER * multiplier * llama) - law(DEARER * llama)
        assert one.equal_flops.value == pytest.approx(equal, abs=1e-4)
        assert one.equal_seconds.value == pytest.approx(equal, abs=1e-4)
        own = law(DEARER * multiplier * llama)
        fewer = own - law(120 * (FEWER * parameters(llama)) ** 2)
        assert one.equal_parameters.value == pytest.approx(fewer, abs=1e-4)
        assert one.twin.value == pytest.approx(own - law(llama))
        assert one.compute_multiplier.low is None  # one seed
    law_found = found.laws["training_flops"]
    assert law_found.floor_D[0] == pytest.approx(1.5, abs=0.01)
    assert law_found.exponent_D[0] == pytest.approx(0.1, abs=0.001)


def test_each_arm_is_taken_at_its_own_best_rate(figure):
    """At the rate 1 the arm is worse than Llama; at its own it is better."""
    found = compared(figure(), worth(1.5, best=4**0.5))
    for one in found.comparisons:
        assert one.learning_rate == pytest.approx(0.008, rel=0.02)
        assert not one.at_edge
        assert one.compute_multiplier.value == pytest.approx(1.5, rel=0.01)


def test_two_sizes_have_a_line_in_logarithms(figure):
    line = lambda flops: 3.0 * (flops / 1e13) ** -0.05
    loss = lambda size, arm, rate, seed: line(FLOPS[size] * (1 if arm == "Llama" else 1.5 * DEARER))
    found = compared(figure(SIZES[:2]), loss)
    for one in found.comparisons:
        assert one.compute_multiplier.value == pytest.approx(1.5)
    assert "straight line between two sizes" in found.notes[0]


def test_one_size_has_differences_and_no_multipliers_and_says_so(figure):
    found = compared(figure(SIZES[:1]), worth(1.5), range(3))
    (one,) = found.comparisons
    assert (one.compute_multiplier, one.parameter_multiplier, one.equal_flops) == (None,) * 3
    assert one.twin.value < 0
    assert "one size" in found.notes[0] and found.laws == {}


def test_a_curve_that_does_not_fall_has_no_multiplier(figure):
    found = compared(figure(SIZES[:2]), lambda size, *_: 3.0)
    assert {one.compute_multiplier for one in found.comparisons} == {None}
    assert [one.equal_flops.value for one in found.comparisons] == [0, 0]


def test_an_arm_below_llamas_floor_is_worth_any_number_of_flops(figure):
    loss = lambda size, arm, rate, seed: law(FLOPS[size]) if arm == "Llama" else 1.2
    one = compared(figure(), loss).comparisons[0]
    assert one.compute_multiplier.value == math.inf
    assert tables.multiplier(one.compute_multiplier) == "∞"


def test_a_diverged_run_takes_its_rate_away_and_no_more(figure):
    loss = worth(1.5)
    broken = lambda *run: math.nan if run[1:] == (ARM, 4, 0) else loss(*run)
    for one in compared(figure(), broken).comparisons:
        assert one.compute_multiplier.value == pytest.approx(1.5, rel=1e-3)
        assert (one.rates, one.at_edge) == (4, False)
    never = lambda *run: math.nan if run[:2] == ("0.6m", ARM) else loss(*run)
    found = compared(figure(), never)
    assert [one.size for one in found.comparisons] == ["0.3m", "1.3m", "2.6m"]
    assert f"Diverged at all learning rates: {ARM} at 0.6m" in found.notes
    no_llama = lambda *run: math.nan if run[:2] == ("0.6m", "Llama") else loss(*run)
    assert [one.size for one in compared(figure(), no_llama).comparisons] == [
        "0.3m",
        "1.3m",
        "2.6m",
    ]


def test_missing_runs(figure):
    """Covers a missing rate, a size with one rate, and an arm that did not run."""
    loss = worth(1.5)
    missing = lambda size, arm, rate, seed: (
        None
        if (size, arm, rate) == ("0.3m", ARM, 0.25) or (size == "1.3m" and rate != 1)
        else loss(size, arm, rate, seed)
    )
    found = compared(figure(), missing)
    assert [(one.rates, one.at_edge) for one in found.comparisons] == [
        (4, False),
        (5, False),
        (1, True),
        (5, False),
    ]
    for one in found.comparisons:
        assert one.compute_multiplier.value == pytest.approx(1.5, rel=1e-3)
    assert "Arms with fewer than three learning rates are at the best of those" in found.notes
    assert compared(figure(), lambda s, arm, *_: 3.0 if arm == "Llama" else None) is None
    assert scaling(figure(), points_of(figure(), [])) is None


def test_seeds_of_the_best_rate_alone_count(figure):
    """They shift the loss by their difference from seed 0 there, for any shape of the curve."""
    noise = lambda arm, seed: 0.02 * seed + (0.003 * seed if arm == ARM else 0)
    loss = worth(1.5, noise=noise)
    some = lambda *run: loss(*run) if run[3] == 0 or run[2] == 1 else None
    for one in compared(figure(), some, range(3)).comparisons:
        assert one.seeds == 3
        llama = law(FLOPS[one.size] * DEARER * 1.5) - law(FLOPS[one.size])
        assert one.twin.value == pytest.approx(llama + 0.003, abs=1e-6)


def test_intervals_hold_the_truth_as_often_as_they_say(figure):
    """With noise, 95 % intervals contain 1.5 in nearly all studies and are not too wide."""
    sweep = figure(SIZES[:3], (1,))
    points = points_of(sweep, rows_of(sweep, worth(1.5), range(3)))
    random, held, widths = np.random.default_rng(0), [], []
    noisy = lambda r: dataclasses.replace(r, loss=r.loss + random.normal(0, 0.003))
    for _ in range(30):
        drawn = [dataclasses.replace(p, rows=tuple(map(noisy, p.rows))) for p in points]
        m = scaling(sweep, drawn).comparisons[1].compute_multiplier
        held.append(m.low <= 1.5 <= m.high)
        widths.append(math.log(m.high / m.low))
    assert 0.88 <= np.mean(held) <= 1.0
    slope = 0.1 * (law(FLOPS["0.6m"] * DEARER * 1.5) - 1.5)  # nats per unit of log FLOPs
    ideal = 2 * 1.96 * 0.003 * (2 / 3) ** 0.5 / slope
    assert 0.9 * ideal < np.median(widths) < 2 * ideal


def test_spread_is_pooled_within_groups():
    assert pooled([[1.0, 2.0, 3.0], [10.0, 12.0], [5.0], []]) == (pytest.approx((4 / 3) ** 0.5), 3)
    assert pooled([[1.0], []]) == (0.0, 0)


def test_pairs_have_the_seeds_of_both(figure):
    found = compared(figure(SIZES[:1]), worth(1.5), range(2))
    (best,), (twin,) = found.others, found.llama
    assert paired(dataclasses.replace(best, losses={1: 2.0, 5: 3.0}), twin) == [
        2.0 - twin.losses[1]
    ]


@pytest.mark.parametrize("spread", [0.002, 0.005, 0.01])
def test_seeds_that_decide(spread):
    """In simulation, this number of seeds decides it four times of five; one fewer does not."""
    seeds = seeds_to_decide(0.005, spread)
    random = np.random.default_rng(0)

    def decided(n):
        values = random.normal(0.005, spread, (20_000, n))
        return np.mean(stats.ttest_1samp(values, 0, axis=1).pvalue < 0.05)

    assert decided(seeds) > 0.79
    assert seeds == 2 or decided(seeds - 1) < 0.81


def test_no_spread_needs_two_seeds_and_a_wide_one_too_many():
    assert seeds_to_decide(0.005, 0.0) == 2
    assert seeds_to_decide(0.005, 1.0) is None


def test_powers_are_of_each_size(figure):
    noise = lambda arm, seed: 0.01 * seed + (0.004 * (seed == 1) if arm == ARM else 0)
    found = compared(figure(), worth(1.5, noise=noise), range(2))
    assert [(power.size, power.freedom) for power in found.powers] == [(s, 1) for s in SIZES]
    for power in found.powers:
        assert power.spread == pytest.approx(0.004 / 2**0.5, rel=1e-3)
        assert power.seeds == seeds_to_decide(0.005, power.spread)
    assert compared(figure(), worth(1.5)).powers == []


@pytest.mark.parametrize("exponent", [0.05, 0.3, 1.0])
def test_a_power_law_is_found(exponent):
    costs = np.geomspace(1e12, 1e15, 4)
    law_D = fit(costs, (2.0 + 1.0 * (costs / 1e13) ** -exponent)[None])
    assert law_D.exponent_D[0] == pytest.approx(exponent, rel=1e-3)
    assert law_D.floor_D[0] == pytest.approx(2.0, abs=0.01)
    loss_D = law_D.loss(3e13)
    assert law_D.cost(loss_D)[0] == pytest.approx(3e13)


def test_the_report_has_the_picture_and_the_tables(tmp_path, capsys):
    (tmp_path / "rows").mkdir()
    sweep = read_sweep(str(FILE), "ladder")
    noise = lambda arm, seed: 0.003 * seed * len(arm)
    for made in rows_of(sweep, worth(1.1, noise=noise), range(2)):
        made.write(epath.Path(tmp_path / "rows") / f"{made.run}.json")
    result = report(tmp_path, capsys, "--config", str(FILE), "--output", str(tmp_path / "out"))
    assert len(result["comparisons"]) == 6 * len(SIZES)
    assert {one["compute_multiplier"]["low"] is None for one in result["comparisons"]} == {False}
    assert len(result["powers"]) == len(SIZES)
    name = "ours_recursion-0.3m-0.6m-1.3m-2.6m-scaling.png"
    assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "index.html").read_text()
    for words in ("compute multiplier", "parameter multiplier", "seeds that decide 0.005 nats"):
        assert words in page

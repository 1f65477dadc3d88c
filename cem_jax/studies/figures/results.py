"""Results of a figure's arms: averages over seeds, best learning rates, what seeds decide.

The runs of a seed share their data's order and, as far as shapes allow, their initialisation, so
the difference between two arms varies less than either. It is decided when Student's 95 % interval
of the mean difference, paired by seed, excludes 0; one seed decides nothing.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, stdev

import numpy as np
from jaxtyping import Float
from scipy.interpolate import Akima1DInterpolator
from scipy.stats import t as student

from cem_jax.studies.figures.grid import Arm, Run, Sweep, Use, runs_of
from cem_jax.studies.figures.rows import Row


@dataclass(frozen=True)
class Line:
    """A point in a figure's table: means and standard deviations over seeds.

    Means without a measured seed and deviations of a single seed are None.
    """

    figure: str
    size: str
    arm: str
    learning_rate: float
    seeds: int
    seed_numbers: str
    parameters: int
    training_flops: float
    tokens: int
    seconds: float | None
    loss: float
    loss_std: float | None
    perplexity: float
    perplexity_std: float | None
    bits_per_byte: float | None


@dataclass(frozen=True)
class Point:
    """An arm at one size and learning rate, with the rows of all its seeds, if any."""

    figure: str
    size: str
    arm: Arm
    rate: float
    learning_rate: float
    rows: tuple[Row, ...]

    @property
    def perplexity(self) -> float:
        """Return the mean over seeds."""
        return mean(row.perplexity for row in self.rows)

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation of the perplexity over seeds; None with one seed."""
        return _std([row.perplexity for row in self.rows])

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds in ascending order."""
        return tuple(sorted(row.seed for row in self.rows))

    # The same for all seeds.
    parameters = property(lambda self: self.rows[0].parameters)
    training_flops = property(lambda self: self.rows[0].training_flops)
    tokens = property(lambda self: self.rows[0].tokens)

    def line(self) -> Line:
        """Return the point as a line of its figure's table."""
        losses = [row.loss for row in self.rows]
        return Line(
            figure=self.figure,
            size=self.size,
            arm=self.arm.name,
            learning_rate=self.learning_rate,
            seeds=len(self.rows),
            seed_numbers=_numbers(self.seeds),
            parameters=self.parameters,
            training_flops=self.training_flops,
            tokens=self.tokens,
            seconds=_mean([row.seconds for row in self.rows]),
            loss=mean(losses),
            loss_std=_std(losses),
            perplexity=self.perplexity,
            perplexity_std=self.deviation,
            bits_per_byte=_mean([row.bits_per_byte for row in self.rows]),
        )

    def __str__(self) -> str:
        rate = "" if self.rate == 1 else f", learning rate {self.learning_rate:g}"
        return f"{self.figure}, {self.size}: {self.arm.name}{rate}"


def points_of(
    sweep: Sweep, rows: Iterable[Row], overrides: Sequence[tuple[str, str]] = ()
) -> list[Point]:
    """Find each arm's rows, which have the same resolved configuration.

    `overrides` are the ones that the runs were trained with.
    """
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    arms = {(size, arm.name): arm for size, arms in sweep.arms.items() for arm in arms}

    def point(run: Run, use: Use) -> Point:
        found = sorted(by_key.get(run.key, []), key=lambda row: row.seed)
        rate = run.config.optimizer.learning_rate
        return Point(sweep.name, run.size, arms[run.size, use.arm], use.rate, rate, tuple(found))

    return [point(run, use) for run in runs_of([sweep], (0,), overrides) for use in run.uses]


@dataclass(frozen=True)
class BestRate:
    """An arm's interpolated optimum; `at_edge`: the true one may lie beyond the rates that ran."""

    figure: str
    size: str
    arm: str
    learning_rate: float
    perplexity: float
    seeds: int
    seed_numbers: str
    at_edge: bool


@dataclass(frozen=True)
class Curve:
    """An arm of one size over the learning rates that ran, in ascending order."""

    points: Sequence[Point]

    @property
    def finite(self) -> list[Point]:
        """Return the points at which no run diverged."""
        measured = lambda point: [m for row in point.rows for m in (row.loss, row.perplexity)]
        return [point for point in self.points if all(map(math.isfinite, measured(point)))]

    @cached_property
    def line(self) -> tuple[Float[np.ndarray, " count"], Float[np.ndarray, " count"]] | None:
        """Interpolate the finite points; None for fewer than three.

        Also None if their seeds differ: differences between rates would be ones between seeds.
        """
        points = self.finite
        if len(points) < 3 or len({point.seeds for point in points}) > 1:
            return None
        return interpolate([p.learning_rate for p in points], [p.perplexity for p in points])

    @cached_property
    def best(self) -> BestRate | None:
        """Return the line's lowest point; None without a line."""
        if self.line is None:
            return None
        (rates, perplexities), point = self.line, self.points[0]
        lowest = int(np.argmin(perplexities))
        return BestRate(
            figure=point.figure,
            size=point.size,
            arm=point.arm.name,
            learning_rate=float(rates[lowest]),
            perplexity=float(perplexities[lowest]),
            seeds=len(point.seeds),
            seed_numbers=_numbers(point.seeds),
            at_edge=lowest in (0, len(rates) - 1),
        )


def interpolate(
    rates: Sequence[float], perplexities: Sequence[float], count: int = 401
) -> tuple[Float[np.ndarray, " count"], Float[np.ndarray, " count"]]:
    """Interpolate perplexity over the logarithm of the learning rate by Akima's method.

    `rates` ascend. Returns `count` rates, evenly spaced in the logarithm, and their perplexities.
    """
    logs = np.log(np.asarray(rates, float))
    fine = np.linspace(logs[0], logs[-1], count)
    return np.exp(fine), Akima1DInterpolator(logs, np.asarray(perplexities, float))(fine)


def curves(points: Iterable[Point]) -> list[Curve]:
    """Group the points that ran by size and arm.

    Each arm's points keep only the seeds that ran at all its rates; all seeds if none did.
    """
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        if point.rows:
            found.setdefault((point.size, point.arm.name), []).append(point)
    return [
        Curve(sorted(_with_shared_seeds(curve), key=lambda p: p.learning_rate))
        for curve in found.values()
    ]


def _with_shared_seeds(curve: Sequence[Point]) -> Sequence[Point]:
    shared = set.intersection(*(set(point.seeds) for point in curve))
    if not shared:
        return curve
    keep = lambda point: tuple(row for row in point.rows if row.seed in shared)
    return [replace(point, rows=keep(point)) for point in curve]


@dataclass(frozen=True)
class Difference:
    """The difference between two arms' losses, paired by seed.

    Attributes:
      seeds: the number that both have.
      difference: nats per token; negative where the arm is better.
      interval: half the width of its 95 % interval; None for one seed.
      verdict: better, worse or undecided.
    """

    figure: str
    size: str
    arm: str
    against: str
    seeds: int
    difference: float
    interval: float | None
    verdict: str


def differences(sweep: Sweep, points: Sequence[Point]) -> list[Difference]:
    """Compare each arm with the baseline, and with the arm before it in its series.

    The arm before has the next smaller T; without T, it is the previous one in the list.
    """
    found = []
    for arm, other in _pairs(sweep, [p for p in points if p.rows and p.rate == 1]):
        ours, theirs = ({row.seed: row.loss for row in p.rows} for p in (arm, other))
        pairs = (ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))
        values = [pair for pair in pairs if math.isfinite(pair)]  # excludes runs that diverged
        if values:
            found.append(
                Difference(
                    figure=sweep.name,
                    size=arm.size,
                    arm=arm.arm.name,
                    against=other.arm.name,
                    seeds=len(values),
                    difference=mean(values),
                    interval=half_interval(values),
                    verdict=_verdict(values),
                )
            )
    return found


def half_interval(values: Sequence[float]) -> float | None:
    """Return half the width of Student's 95 % interval of the mean; None below two values."""
    n = len(values)
    if n < 2:
        return None
    return float(student.ppf(0.975, n - 1)) * stdev(values) / math.sqrt(n)


def _verdict(values: Sequence[float]) -> str:
    half = half_interval(values)
    if half is None or not abs(mean(values)) > half:
        return "undecided"
    return "better" if mean(values) < 0 else "worse"


def _pairs(sweep: Sweep, points: Sequence[Point]) -> Iterator[tuple[Point, Point]]:
    for size in dict.fromkeys(point.size for point in points):
        here = [point for point in points if point.size == size]
        base = next((p for p in here if p.arm.name == sweep.baseline), None)
        for index, point in enumerate(here):
            if base is not None and point is not base:
                yield point, base
            before = [p for p in here[:index] if _leads_to(p, point)]
            if before and before[-1] is not base:
                yield point, before[-1]


def _leads_to(earlier: Point, later: Point) -> bool:
    """Return whether a figure goes from one arm to the other, by recursion steps or arm by arm."""
    if earlier.arm.series != later.arm.series:
        return False
    if earlier.arm.x is None or later.arm.x is None:
        return earlier.arm.x is later.arm.x
    return earlier.arm.x < later.arm.x


def _numbers(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else mean(values)


def _std(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation; None for one value or if any is not finite."""
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None

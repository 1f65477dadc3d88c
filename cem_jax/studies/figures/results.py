"""What is known of a figure's arms: their rows, averaged over seeds; and the best learning rate."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.interpolate import Akima1DInterpolator

from cem_jax.studies.figures.grid import Arm, Run, Sweep, runs_of

COLUMNS = (
    "figure",
    "size",
    "arm",
    "learning_rate",
    "seeds",
    "seed_numbers",
    "parameters",
    "training_flops",
    "tokens",
    "seconds",
    "loss",
    "loss_std",
    "perplexity",
    "perplexity_std",
    "bits_per_byte",
)


@dataclass(frozen=True)
class Point:
    """An arm at one size and learning rate, with the rows of all its seeds, which may be none."""

    figure: str
    size: str
    arm: Arm
    rate: float
    learning_rate: float
    rows: tuple[Mapping[str, Any], ...]

    @property
    def perplexity(self) -> float:
        """Mean over seeds."""
        return mean(row["perplexity"] for row in self.rows)

    @property
    def spread(self) -> float:
        """Standard deviation of the perplexity over seeds; 0 with one seed."""
        return _std([row["perplexity"] for row in self.rows]) or 0.0

    @property
    def seeds(self) -> tuple[int, ...]:
        """In ascending order."""
        return tuple(sorted(row["seed"] for row in self.rows))

    def value(self, name: str) -> float:
        """A field of the rows that is the same for all seeds."""
        return self.rows[0][name]

    def line(self) -> dict[str, Any]:
        """One line of the figure's table, fields `COLUMNS`."""
        average = lambda name: _mean([row[name] for row in self.rows])
        return {
            "figure": self.figure,
            "size": self.size,
            "arm": self.arm.name,
            "learning_rate": self.learning_rate,
            "seeds": len(self.rows),
            "seed_numbers": _numbers(self.seeds),
            **{name: self.value(name) for name in ("parameters", "training_flops", "tokens")},
            "seconds": average("seconds"),
            "loss": average("loss"),
            "loss_std": _std([row["loss"] for row in self.rows]),
            "perplexity": self.perplexity,
            "perplexity_std": _std([row["perplexity"] for row in self.rows]),
            "bits_per_byte": average("bits_per_byte"),
        }

    def __str__(self) -> str:
        rate = "" if self.rate == 1 else f", learning rate {self.learning_rate:g}"
        return f"{self.figure}, {self.size}: {self.arm.name}{rate}"


def points_of(
    sweep: Sweep,
    rows: Iterable[Mapping[str, Any]],
    overrides: Sequence[tuple[str, Any]] = (),
) -> list[Point]:
    """Every arm of the sweep with the rows that are its: those of the same resolved configuration.

    `overrides`: those that the runs were made with.
    """
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_key.setdefault(row["key"], []).append(row)
    arms = {(size, arm.name): arm for size, arms in sweep.arms.items() for arm in arms}

    def point(run: Run, use) -> Point:
        found = sorted(by_key.get(run.key, []), key=lambda row: row["seed"])
        rate = run.config.optimizer.learning_rate
        return Point(sweep.name, run.size, arms[run.size, use.arm], use.rate, rate, tuple(found))

    return [point(run, use) for run in runs_of([sweep], (0,), overrides) for use in run.uses]


def interpolate(
    rates: Sequence[float], perplexities: Sequence[float], count: int = 401
) -> tuple[Float[np.ndarray, " count"], Float[np.ndarray, " count"]]:
    """Akima's interpolation of perplexity over the logarithm of the learning rate.

    `rates` ascend. Returns `count` rates, evenly spaced in the logarithm, and their perplexities.
    """
    logs = np.log(np.asarray(rates, float))
    fine = np.linspace(logs[0], logs[-1], count)
    curve = Akima1DInterpolator(logs, np.asarray(perplexities, float))(fine)
    return np.exp(fine), curve


def best_rates(points: Sequence[Point]) -> list[dict[str, Any]]:
    """{figure, size, arm, learning_rate, perplexity, seeds, seed_numbers, at_edge} of each curve.

    `at_edge`: the lowest is an end of the range, and the optimum may lie beyond.
    """
    found = []
    for (size, arm), curve in curves(points).items():
        line = interpolated(curve)
        if line is None:
            continue
        rates, perplexities = line
        lowest = int(np.argmin(perplexities))
        found.append(
            {
                "figure": curve[0].figure,
                "size": size,
                "arm": arm,
                "learning_rate": float(rates[lowest]),
                "perplexity": float(perplexities[lowest]),
                "seeds": len(curve[0].seeds),
                "seed_numbers": _numbers(curve[0].seeds),
                "at_edge": lowest in (0, len(rates) - 1),
            }
        )
    return found


def interpolated(
    curve: Sequence[Point],
) -> tuple[Float[np.ndarray, " count"], Float[np.ndarray, " count"]] | None:
    """`interpolate` of a curve from `curves`; None for fewer than three rates, or other seeds at
    some of them, where a difference between rates would be one between seeds."""
    if len(curve) < 3 or len({point.seeds for point in curve}) > 1:
        return None
    return interpolate([p.learning_rate for p in curve], [p.perplexity for p in curve])


def curves(points: Iterable[Point]) -> dict[tuple[str, str], list[Point]]:
    """The points that are there, by size and arm, in ascending order of the learning rate.

    Of each only the seeds that all rates of its arm have; all of its own where these are none.
    """
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        if point.rows:
            found.setdefault((point.size, point.arm.name), []).append(point)
    return {
        key: sorted(_of_shared_seeds(curve), key=lambda p: p.learning_rate)
        for key, curve in found.items()
    }


def _of_shared_seeds(curve: Sequence[Point]) -> Sequence[Point]:
    shared = set.intersection(*(set(point.seeds) for point in curve))
    if not shared:
        return curve
    keep = lambda point: tuple(row for row in point.rows if row["seed"] in shared)
    return [replace(point, rows=keep(point)) for point in curve]


def _numbers(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else mean(values)


def _std(values: Sequence[float]) -> float | None:
    """Of a sample; None for one value."""
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None

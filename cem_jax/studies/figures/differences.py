"""What the seeds decide: differences in loss between two arms, paired by seed.

The runs of a seed share their data's order and, as far as shapes allow, their initialisation, so
their difference varies less than either. It is decided when Student's 95 % interval of the mean
difference does not hold 0; with one seed nothing is.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

from cem_jax.studies.figures.grid import Sweep
from cem_jax.studies.figures.results import Point


def differences(sweep: Sweep, points: Sequence[Point]) -> list[dict[str, Any]]:
    """{figure, size, arm, against, seeds, difference, interval, verdict} of each pair worth asking.

    Each arm against the baseline, and against the arm before it in its series: that of the next
    smaller T, or simply the one before where arms have no T.
    `difference` is in nats a token, negative where the arm is better; `interval` is half the width
    of its 95 % interval, None for one seed; `verdict` is better, worse or undecided.
    """
    found = []
    for arm, other in _pairs(sweep, [p for p in points if p.rows and p.rate == 1]):
        ours, theirs = ({row["seed"]: row["loss"] for row in p.rows} for p in (arm, other))
        pairs = (ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))
        values = [pair for pair in pairs if math.isfinite(pair)]  # not of a run that diverged
        if values:
            found.append(
                {
                    "figure": sweep.name,
                    "size": arm.size,
                    "arm": arm.arm.name,
                    "against": other.arm.name,
                    "seeds": len(values),
                    "difference": mean(values),
                    "interval": half_interval(values),
                    "verdict": _verdict(values),
                }
            )
    return found


def half_interval(values: Sequence[float]) -> float | None:
    """Half the width of Student's 95 % interval of the mean; None for fewer than two values."""
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
    """Whether a figure goes from one arm to the other: by steps of recursion, or arm by arm."""
    if earlier.arm.series != later.arm.series:
        return False
    if earlier.arm.x is None or later.arm.x is None:
        return earlier.arm.x is later.arm.x
    return earlier.arm.x < later.arm.x

"""The sections of a report, one per figure: the points that ran, tables, and what is missing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cem_jax.studies.figures import tables
from cem_jax.studies.figures.grid import Sweep
from cem_jax.studies.figures.results import (
    BestRate,
    Curve,
    Difference,
    Line,
    Point,
    curves,
    differences,
)
from cem_jax.studies.figures.scaling import Scaling, scaling
from cem_jax.studies.figures.unmatched import Unmatched


@dataclass(frozen=True)
class Section:
    """A figure and all its points, some of which may have no rows."""

    sweep: Sweep
    points: Sequence[Point]

    @property
    def stem(self) -> str:
        """Return the name of its files, without a suffix."""
        return f"{self.sweep.name}-{self._sizes(self.present)}"

    @property
    def name(self) -> str:
        """Return the figure's name with its sizes, since a report may have it at several."""
        return f"{self.sweep.name}, {self._sizes(self.points)}"

    @property
    def title(self) -> str:
        """Return the figure's title, with how much of it ran if not all."""
        words = f"{self.sweep.name}: {self.sweep.title}"
        if not self.missing:
            return words
        several = len(self.sweep.rates) > 1 or len(self.sweep.arms) > 1
        kind = "runs" if several else "arms"
        return f"{words} ({len(self.present)} of {len(self.points)} {kind})"

    @cached_property
    def present(self) -> list[Point]:
        return [point for point in self.points if point.rows]

    @cached_property
    def missing(self) -> list[str]:
        return [str(point) for point in self.points if not point.rows]

    @cached_property
    def others(self) -> list[Point]:
        """Return the points that ran besides the baseline."""
        return [point for point in self.present if point.arm.name != self.sweep.baseline]

    @property
    def begun(self) -> bool:
        """Return whether more than the baseline, which other figures share, ran."""
        return bool(self.others)

    @property
    def comparable(self) -> bool:
        """Return whether a picture would show what the title says, not just one point."""
        if self.sweep.plot == "test_steps":
            return len(self._not_evaluated) < len(self.others)
        if self.sweep.plot == "learning_rate":
            return len(self.present) > 2
        return len(self.others) > 1 or not self.missing

    @cached_property
    def curves(self) -> list[Curve]:
        """Return the curves of a learning-rate figure."""
        return curves(self.points) if self.sweep.plot == "learning_rate" else []

    @cached_property
    def shown(self) -> list[Point]:
        """Return the points of picture and table; learning-rate curves keep seeds of all rates."""
        if self.sweep.plot != "learning_rate":
            return self.present
        return [point for curve in self.curves for point in curve.points]

    @cached_property
    def lines(self) -> list[Line]:
        return [point.line() for point in self.shown]

    @cached_property
    def differences(self) -> list[Difference]:
        return differences(self.sweep, self.present)

    @property
    def best(self) -> list[BestRate]:
        return [curve.best for curve in self.curves if curve.best]

    @cached_property
    def scaling(self) -> Scaling | None:
        """Return arms at their best rates over sizes; None for a figure of one rate and size."""
        if self.sweep.plot != "learning_rate" and len({p.size for p in self.present}) < 2:
            return None
        return scaling(self.sweep, self.points)

    @cached_property
    def notes(self) -> list[str]:
        """Return notes for readers of the table."""
        notes = []
        if self.sweep.plot == "test_steps" and self._not_evaluated:
            arms = ", ".join(dict.fromkeys(point.arm.name for point in self._not_evaluated))
            notes.append(f"Not evaluated with other T than trained, which `cem sweep` does: {arms}")
        elif not self.comparable:
            notes.append("Not drawn: one point beside the baseline compares nothing yet")
        return notes + [
            f"{curve.points[0].arm.name} at {curve.points[0].size}: no seed ran at all learning "
            "rates, so there is no curve"
            for curve in self.curves
            if len(curve.points) >= 3 and not curve.best
        ]

    @property
    def _not_evaluated(self) -> list[Point]:
        return [p for p in self.others if not any(row.loss_at_steps for row in p.rows)]

    def _sizes(self, points: Sequence[Point]) -> str:
        return "-".join(dict.fromkeys(point.size for point in points))


def summary(sections: Sequence[Section], strays: Sequence[Unmatched]) -> Iterator[str]:
    """A report for the terminal: how much ran and is missing, then a line per arm.

    A baseline that figures share has one line, before them.
    """
    yield from _counts(sections)
    for group in strays:
        yield f"matches no requested figure: {group}"
    begun = [section for section in sections if section.begun]
    baselines: dict[str, Point] = {}
    for section in begun:
        for point in section.present:
            if point.arm.name == section.sweep.baseline and point.rate == 1:
                baselines.setdefault(point.rows[0].key, point)
    for point in baselines.values():
        yield f"{point.size}, {point.arm.name}: {_measured(point)}"
    for section in begun:
        yield section.title
        arms = _curves if section.sweep.plot == "learning_rate" else _arms
        yield from (f"  {line}" for line in [*arms(section), *section.notes, *_scaling(section)])


def _counts(sections: Sequence[Section]) -> Iterator[str]:
    ran = {row.run for section in sections for p in section.present for row in p.rows}
    lacking = {s.name: len(s.missing) for s in sections if s.missing}
    words = "".join(f"\n  {name}: {count}" for name, count in lacking.items())
    yield f"{len(ran)} runs in {sum(s.begun for s in sections)} figures; missing: " + (
        f"{sum(lacking.values())}{words}" if lacking else "none"
    )


def _arms(section: Section) -> Iterator[str]:
    for point in section.others:
        compared = "".join(
            f"; {tables.difference(pair.difference, pair.interval)} nats against {pair.against}, "
            f"{pair.verdict}"
            for pair in section.differences
            if (pair.size, pair.arm) == (point.size, point.arm.name)
        )
        yield f"{_named(section, point)}: {_measured(point)}{compared}"


def _curves(section: Section) -> Iterator[str]:
    """Return one line per curve: its optimum and its points."""
    for curve in section.curves:
        told, first = "no curve yet", curve.points[0]
        if curve.best:
            perplexity = tables.perplexity(curve.best.perplexity)
            told = f"best {tables.rate(curve.best)}, perplexity {perplexity}, {_seeds(first)}"
        values = ", ".join(
            f"{p.learning_rate:.3g}: {tables.perplexity(p.perplexity)}" for p in curve.points
        )
        yield f"{_named(section, first)}: learning rate {told} ({values})"


def _scaling(section: Section) -> Iterator[str]:
    """Return one line per arm and size that has multipliers."""
    for one in section.scaling.comparisons if section.scaling else ():
        if one.compute_multiplier or one.parameter_multiplier:
            yield (
                f"{one.size}, {one.arm}: {tables.estimated_difference(one.twin)} nats at its best; "
                f"compute multiplier {tables.multiplier(one.compute_multiplier)}, "
                f"parameter multiplier {tables.multiplier(one.parameter_multiplier)}"
            )


def _named(section: Section, point: Point) -> str:
    several = len(section.sweep.arms) > 1
    return f"{point.size}, {point.arm.name}" if several else point.arm.name


def _measured(point: Point) -> str:
    return f"perplexity {tables.perplexity(point.perplexity, point.deviation)}, {_seeds(point)}"


def _seeds(point: Point) -> str:
    return f"{'seed' if len(point.seeds) == 1 else 'seeds'} {', '.join(map(str, point.seeds))}"

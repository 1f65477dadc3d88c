"""What a report has to say of one figure: the points that ran, tables, and what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cem_jax.studies.figures.differences import differences
from cem_jax.studies.figures.grid import Sweep
from cem_jax.studies.figures.results import Point, best_rates, curves, interpolated


@dataclass(frozen=True)
class Section:
    """A figure and all its points, of which any may have no rows."""

    sweep: Sweep
    points: Sequence[Point]

    @property
    def stem(self) -> str:
        """Of its files' names."""
        return f"{self.sweep.name}-{self._sizes(self.present)}"

    @property
    def name(self) -> str:
        """For a list in which a figure stands once for each set of sizes."""
        return f"{self.sweep.name}, {self._sizes(self.points)}"

    @property
    def title(self) -> str:
        """With how much of it ran, where that is not all."""
        words = f"{self.sweep.name}: {self.sweep.title}"
        if not self.missing:
            return words
        several = len(self.sweep.rates) > 1 or len(self.sweep.arms) > 1
        kind = "runs" if several else "arms"
        return f"{words} ({len(self.present)} of {len(self.points)} {kind})"

    @property
    def present(self) -> list[Point]:
        return [point for point in self.points if point.rows]

    @property
    def missing(self) -> list[str]:
        return [str(point) for point in self.points if not point.rows]

    @property
    def begun(self) -> bool:
        """Whether there is more of it than its baseline, which it shares with other figures."""
        return bool(self.others)

    @property
    def comparable(self) -> bool:
        """Whether a picture shows what the title says, rather than one point by the baseline."""
        if self.sweep.plot == "test_steps":
            return len(self._not_evaluated) < len(self.others)
        if self.sweep.plot == "learning_rate":
            return len(self.present) > 2
        return len(self.others) > 1 or not self.missing

    @property
    def others(self) -> list[Point]:
        """What ran besides the baseline."""
        return [point for point in self.present if point.arm.name != self.sweep.baseline]

    @cached_property
    def curves(self) -> dict[tuple[str, str], list[Point]]:
        """Of a learning-rate figure, by size and arm."""
        return curves(self.points)

    @cached_property
    def shown(self) -> list[Point]:
        """What the picture and the table have: of a learning-rate curve, seeds all rates have."""
        if self.sweep.plot != "learning_rate":
            return self.present
        return [point for curve in self.curves.values() for point in curve]

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The table, fields `results.COLUMNS`."""
        return [point.line() for point in self.shown]

    @cached_property
    def differences(self) -> list[dict[str, Any]]:
        return differences(self.sweep, self.present)

    @cached_property
    def best(self) -> list[dict[str, Any]]:
        return best_rates(self.points) if self.sweep.plot == "learning_rate" else []

    @cached_property
    def notes(self) -> list[str]:
        """What a reader of the table should know."""
        notes = []
        if self.sweep.plot == "test_steps" and self._not_evaluated:
            arms = ", ".join(dict.fromkeys(point.arm.name for point in self._not_evaluated))
            notes.append(f"Not evaluated with other T than trained, which `cem sweep` does: {arms}")
        elif not self.comparable:
            notes.append("Not drawn: one point beside the baseline compares nothing yet")
        if self.sweep.plot == "learning_rate":
            notes += [
                f"{arm} at {size}: no seed ran at all learning rates, so there is no curve"
                for (size, arm), curve in self.curves.items()
                if len(curve) >= 3 and interpolated(curve) is None
            ]
        return notes

    @property
    def _not_evaluated(self) -> list[Point]:
        return [p for p in self.others if not any(row["loss_at_steps"] for row in p.rows)]

    def _sizes(self, points: Sequence[Point]) -> str:
        return "-".join(dict.fromkeys(point.size for point in points))

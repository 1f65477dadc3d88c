"""The printed output of `cem verify`: progress, the table, facts about descent, the summary."""

import itertools
import sys
import time
from collections.abc import Iterable, Sequence

from cem_jax.text import ProgressLine, aligned
from cem_jax.verify.descent import Fact
from cem_jax.verify.rows import Row

_HEADER = ("check", "shape", "dtype", "error", "tolerance", "")


class Progress:
    """The current stage, shown on standard error."""

    def __init__(self, stages: int):
        self.stages, self.done, self.started = stages, 0, time.monotonic()
        self._line = ProgressLine(sys.stderr)

    def stage(self, title: str) -> None:
        self.done += 1
        self._line.show(f"[{self.done}/{self.stages}] {self.seconds:4.0f} s  {title}")

    def close(self) -> None:
        self._line.clear()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def table(sections: Sequence[tuple[str, Sequence[Row]]]) -> Iterable[str]:
    """Yield the lines of the table; columns are as wide as their longest entry."""
    cells = [_cells(row) for _, rows in sections for row in rows]
    header, *lines = aligned([_HEADER, *cells], "<<<>><").splitlines()
    yield header
    following = iter(lines)
    for title, rows in sections:
        yield ""
        yield title
        yield from itertools.islice(following, len(rows))


def fact_line(fact: Fact) -> str:
    """Return a line: whether descent of a sublayer is provable and why, and what was measured."""
    seen = f"the energy rose in {fact.rising:.1%} of {fact.steps} random steps"
    if fact.provable:
        return f"{fact.sublayer}: descent is provable and checked above ({fact.reason}); {seen}"
    return f"{fact.sublayer}: descent is not provable: {fact.reason}; {seen}"


def summary(rows: Sequence[Row], seconds: float) -> Iterable[str]:
    """Yield the failed rows again, and the verdict."""
    failed = [row for row in rows if not row.passed]
    for row in failed:
        where = f", worst in {row.detail}" if row.detail else ""
        yield (
            f"FAILED {row.check} ({row.shape}, {row.dtype}): "
            f"error {row.error:.2e} > {row.tolerance:.2e}{where}"
        )
    count, outcome = (f"{len(failed)} of", "failed") if failed else ("all", "passed")
    yield f"{count} {len(rows)} checks {outcome} in {seconds:.0f} s"


def _cells(row: Row) -> tuple[str, ...]:
    outcome = "ok" if row.passed else "FAIL"
    numbers = (_number(row.error), _number(row.tolerance))
    return (row.check, row.shape, row.dtype, *numbers, outcome)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"

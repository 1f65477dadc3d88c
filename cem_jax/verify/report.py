"""What a person sees of `cem verify`: a line of progress, the table, what descends, a summary."""

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO

from cem_jax.verify.descent import Fact
from cem_jax.verify.rows import Row

_HEADER = ("check", "shape", "dtype", "error", "tolerance", "")


class Progress:
    """A line on standard error: rewritten on a terminal, else one for each stage."""

    def __init__(self, stages: int, stream: TextIO | None = None):
        self.stages = stages
        self.stream = stream or sys.stderr
        self.started = time.monotonic()
        self.done = 0

    def stage(self, title: str) -> None:
        self.done += 1
        line = f"[{self.done}/{self.stages}] {self.seconds:4.0f} s  {title}"
        if self.stream.isatty():
            self.stream.write(f"\r\x1b[K{line}")
        else:
            self.stream.write(f"{line}\n")
        self.stream.flush()

    def close(self) -> None:
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def table(sections: Sequence[tuple[str, Sequence[Row]]]) -> Iterable[str]:
    """Lines of the table, its columns as wide as their longest entry."""
    cells = {id(row): _cells(row) for _, rows in sections for row in rows}
    widths = [max(map(len, column)) for column in zip(_HEADER, *cells.values(), strict=True)]

    def line(entries: Sequence[str]) -> str:
        left = [e.ljust(w) for e, w in zip(entries[:3], widths[:3], strict=True)]
        right = [e.rjust(w) for e, w in zip(entries[3:5], widths[3:5], strict=True)]
        return "  ".join([*left, *right, entries[5]]).rstrip()

    yield line(_HEADER)
    for title, rows in sections:
        yield ""
        yield title
        for row in rows:
            yield line(cells[id(row)])


def fact_line(fact: Fact) -> str:
    """What is provable of a sublayer's descent, or why not, and what was seen."""
    seen = f"the energy rose at {fact.rising:.1%} of {fact.steps} random steps"
    if fact.provable:
        return f"{fact.sublayer}: descent is provable and checked above ({fact.reason}); {seen}"
    return f"{fact.sublayer}: no descent is provable: {fact.reason}; {seen}"


def summary(rows: Sequence[Row], seconds: float) -> Iterable[str]:
    """The failed rows again, and the verdict."""
    failed = [row for row in rows if not row.passed]
    for row in failed:
        where = f", worst in {row.detail}" if row.detail else ""
        yield (
            f"FAILED {row.check} ({row.shape}, {row.dtype}): "
            f"error {row.error:.2e} > {row.tolerance:.2e}{where}"
        )
    verdict = (
        f"{len(failed)} of {len(rows)} checks failed"
        if failed
        else (f"all {len(rows)} checks passed")
    )
    yield f"{verdict} in {seconds:.0f} s"


def _cells(row: Row) -> tuple[str, ...]:
    outcome = "ok" if row.passed else "FAIL"
    numbers = (_number(row.error), _number(row.tolerance))
    return (row.check, row.shape, row.dtype, *numbers, outcome)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"

"""Progress lines, aligned tables, formatted numbers and plain JSON values."""

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TextIO

_TERMINAL_SECONDS = 0.5


class ProgressLine:
    """A status line: rewritten in place on a terminal, elsewhere a new line at intervals.

        if line.is_due():
            line.show(f"step {step}/{total}", f"loss {loss:.3f}", f"ETA {format_duration(eta)}")

    Args:
      stream: where to write it.
      every: seconds between lines if `stream` is not a terminal.
      at_once: whether a line is due from the start, or only after the first interval.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        every: float = 5.0,
        at_once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream, self._clock = stream, clock
        self._moving = stream.isatty()
        self._every = _TERMINAL_SECONDS if self._moving else every
        self._last = -math.inf if at_once else clock()
        self._width = 0  # of the unfinished line on the terminal

    def is_due(self) -> bool:
        """Return whether a new line is due; ask before computing its content."""
        return self._clock() - self._last >= self._every

    def show(self, *parts: str) -> None:
        """Write the parts as one line.

        On a terminal it is cut to one row, since a wrapped line could not be rewritten: parts are
        dropped from the end, except the last one, which shows the time left.
        """
        self._last = self._clock()
        if self._moving:
            line = _fitted(list(parts), _columns(self._stream) - 1)
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write("  ".join(parts) + "\n")
        self._stream.flush()

    def message(self, text: str) -> None:
        """Write `text` on its own line."""
        self.finish()
        self._stream.write(text + "\n")
        self._stream.flush()

    def finish(self) -> None:
        """End the line on the terminal, if there is one."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0

    def clear(self) -> None:
        """Remove the line from the terminal, if there is one."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


class Pace:
    """Mean speed since the first call, and time left, for work of known size.

    Time before the first call, which often includes compilation, does not count.

    Args:
      total: the amount of work, in any unit.
      clock: monotonic seconds.
    """

    def __init__(self, total: float, *, clock: Callable[[], float] = time.monotonic):
        self._total, self._clock = total, clock
        self._first: tuple[float, float] | None = None  # (time, work done by then)

    def per_second(self, done: float) -> float | None:
        """Return work per second; None until two different amounts `done` were seen."""
        now = self._clock()
        start, before = self._first = self._first or (now, done)
        return (done - before) / (now - start) if done > before and now > start else None

    def seconds_left(self, done: float) -> float | None:
        """Return the expected seconds left; None when `per_second` is."""
        speed = self.per_second(done)
        return (self._total - done) / speed if speed else None


def aligned(rows: Sequence[Sequence[str]], sides: str) -> str:
    """Return `rows` as a table whose columns are as wide as their longest cell.

    Args:
      rows: cells, as many in each row as `sides` has characters; usually the header first.
      sides: per column, "<" aligns left and ">" aligns right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def format_count(number: float) -> str:
    """Format a number as three digits and a unit: 87, 942, 12.3k, 1.25M, 8.26T."""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size * 0.9995:
            scaled = number / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{number:.0f}"


def format_duration(seconds: float | None) -> str:
    """Format a time as 12:34 (minutes, seconds), 1:02:03 or 2d 03:04:05; "?" if unknown."""
    if seconds is None:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def format_rate(rate: float) -> str:
    """Format a learning rate with two digits: 1.9e-3."""
    mantissa, exponent = f"{rate:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def format_mb(size: float) -> str:
    """Format bytes of a file as MB (10⁶): 1,234.5."""
    return f"{size / 1e6:,.1f}"


def format_mib(size: float | None) -> str:
    """Format bytes of memory as MiB (2²⁰): 1,234.5; empty if unknown."""
    return "" if size is None else f"{size / 2**20:,.1f}"


def plain(value: Any) -> Any:
    """Return `value` as plain JSON values: records as dicts, NaN and infinities as None.

    Raises TypeError unless it is text, a number, array, path, record or collection.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if hasattr(value, "tolist"):  # NumPy and JAX scalars and arrays
        return plain(value.tolist())
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    raise TypeError(f"a JSON value must be numbers or text, not {type(value).__name__}")


def _fitted(parts: list[str], width: int) -> str:
    while len(line := "  ".join(parts)) > width and len(parts) > 2:
        del parts[-2]
    return line if len(line) <= width else line[: width - 1] + "…"


def _columns(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):  # no real terminal
        return shutil.get_terminal_size().columns

"""Measured throughput, expected time left, and console lines of a run.

    with progress.rate.waiting():
        batch = next(batches)
    state, metrics = train_step(state, batch)
    progress.rate.step_done()
    progress.update(step, loss=loss, learning_rate=learning_rate)

Validation, checkpoints and other pauses run under `progress.rate.paused()`: they do not count as
step time, and the ETA includes their share so far.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from cem_jax.text import ProgressLine, format_count, format_duration, format_rate

_WINDOW = 100  # steps that count as recent


class Throughput:
    """Seconds per step, tokens per second and the share of time spent waiting for data.

    The first step is not measured, since it includes compilation. All figures are None until two
    steps are done.

    Args:
      tokens_per_step: tokens per update, over all devices.
      clock: monotonic seconds.
    """

    def __init__(self, tokens_per_step: int, *, clock: Callable[[], float] = time.monotonic):
        self._tokens, self._clock = tokens_per_step, clock
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._waits: deque[float] = deque(maxlen=_WINDOW)
        self._mark: float | None = None  # when the last step was done
        self._wait = 0.0  # since then
        self._pause = 0.0  # since then
        self._all_pauses = 0.0
        self._measured = 0

    def step_done(self) -> None:
        """Record that a step has just ended."""
        now = self._clock()
        if self._mark is not None:
            self._seconds.append(max(now - self._mark - self._pause, 0.0))
            self._waits.append(self._wait)
            self._all_pauses += self._pause
            self._measured += 1
        self._mark, self._wait, self._pause = now, 0.0, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        start = self._clock()
        try:
            yield
        finally:
            self._wait += self._clock() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside (validation, a checkpoint) from steps."""
        start = self._clock()
        try:
            yield
        finally:
            self._pause += self._clock() - start

    @property
    def step_seconds(self) -> float | None:
        """Seconds per recent step: the mean of the middle half, so stragglers do not count."""
        return _midmean(self._seconds) if self._seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second at `step_seconds`."""
        seconds = self.step_seconds
        return self._tokens / seconds if seconds else None

    @property
    def data_wait_fraction(self) -> float | None:
        """Share (0 to 1) of the recent steps' time spent waiting for data."""
        total = sum(self._seconds)
        return min(sum(self._waits) / total, 1.0) if total else None

    @property
    def seconds_ahead(self) -> float | None:
        """Expected seconds per future step, including its share of pauses."""
        seconds = self.step_seconds
        if seconds is None:
            return None
        return seconds + (self._all_pauses + self._pause) / self._measured


class Progress(ProgressLine):
    """A run's status line: step, loss, learning rate, speed and time left.

    Args:
      total_steps: the step the run ends at.
      tokens_per_step: tokens per update.
      stream: where to write the lines.
      every: seconds between lines if `stream` is not a terminal.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int,
        tokens_per_step: int,
        stream: TextIO,
        *,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(stream, every=every, at_once=True, clock=clock)
        self.rate = Throughput(tokens_per_step, clock=clock)
        self._total = total_steps

    def eta_seconds(self, step: int) -> float | None:
        """Return the expected seconds from `step` (updates done) to the end; None if unknown."""
        ahead = self.rate.seconds_ahead
        return None if ahead is None else ahead * max(self._total - step, 0)

    def update(self, step: int, *, loss: float, learning_rate: float) -> None:
        """Write the line of `step` if it is due; the last step's is always due."""
        if not (step >= self._total or self.is_due()):
            return
        parts = [
            f"step {step}/{self._total}",
            f"loss {loss:.3f}",
            f"lr {format_rate(learning_rate)}",
        ]
        if (tokens := self.rate.tokens_per_second) is not None:
            parts.append(f"{format_count(tokens)} tok/s")
        if (share := self.rate.data_wait_fraction) is not None and share >= 0.005:
            parts.append(f"{100 * share:.0f} % of time waiting for data")
        if (eta := self.eta_seconds(step)) is not None:
            parts.append(f"ETA {format_duration(eta)}")
        self.show(*parts)

    def between(self, text: str) -> None:
        """Write `text`, about work between two steps, if a line is due."""
        if self.is_due():
            self.show(text)


def _midmean(values: deque[float]) -> float:
    ordered = sorted(values)
    drop = len(ordered) // 4
    middle = ordered[drop : len(ordered) - drop]
    return sum(middle) / len(middle)

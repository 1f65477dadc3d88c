"""The line that `cem prepare` shows on standard error while it works."""

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import TextIO

from cem_jax.text import Pace, ProgressLine, format_duration, format_mb

_LOG_SECONDS = 15.0
_BAR = 20  # characters


class PrepareProgress(ProgressLine):
    """Bytes read, documents, tokens per second and the time left."""

    def __init__(self, sizes: Sequence[int], stream: TextIO):
        super().__init__(stream, every=_LOG_SECONDS)
        self._before = list(accumulate(sizes, initial=0))
        self._total = self._before[-1]
        self.start(0, 0)

    def start(self, file: int, tokens: int) -> None:
        """Begin at this file; `tokens` were made earlier and do not count towards the speed."""
        self._bytes, self._tokens, self._started = self._before[file], tokens, time.monotonic()
        self._pace = Pace(self._total)
        self._pace.seconds_left(self._bytes)

    def read(self, file: int, position: int) -> None:
        """Note that a file was read up to `position`, in stored bytes."""
        self._bytes = self._before[file] + position

    def made(self, documents: int, tokens: int) -> None:
        """Show a line if one is due, with the documents and tokens written so far."""
        if not self.is_due():
            return
        speed = (tokens - self._tokens) / (time.monotonic() - self._started)
        self.show(
            f"{_bar(self._bytes, self._total)} {format_mb(self._bytes)} of "
            f"{format_mb(self._total)} MB",
            f"{documents:,} documents",
            f"{tokens:,} tokens",
            f"{speed:,.0f} tokens/s",
            f"ETA {format_duration(self._pace.seconds_left(self._bytes))}",
        )


def _bar(done: int, total: int) -> str:
    filled = _BAR * done // max(1, total)
    return f"[{'#' * filled}{'.' * (_BAR - filled)}]"

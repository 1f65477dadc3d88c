"""The line that `cem prepare` shows on standard error while it works."""

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import TextIO

_TERMINAL_SECONDS = 0.5
_LOG_SECONDS = 15.0
_BAR = 20  # characters


class PrepareProgress:
    """Bytes read, documents, tokens a second and the time left; rare lines when not a terminal."""

    def __init__(self, sizes: Sequence[int], stream: TextIO):
        self._before = list(accumulate(sizes, initial=0))
        self._stream = stream
        self._terminal = stream.isatty()
        self._every = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        self._any = False
        self.start(0, 0)

    def start(self, file: int, tokens: int) -> None:
        """Work begins at this file; so many tokens were made earlier, and count for no speed."""
        self._started = self._shown = time.monotonic()
        self._first = self._bytes = self._before[file]
        self._tokens = tokens

    def read(self, file: int, position: int) -> None:
        """So many bytes of a file, as stored, have been read."""
        self._bytes = self._before[file] + position

    def made(self, documents: int, tokens: int) -> None:
        """So many documents and tokens were written; shows a line when it is time."""
        now = time.monotonic()
        if now - self._shown < self._every:
            return
        self._shown = now
        spent = now - self._started
        total, done = self._before[-1], self._bytes - self._first
        left = _clock(spent * (total - self._bytes) / done) if done else "?"
        speed = (tokens - self._tokens) / spent
        line = (
            f"{_bar(self._bytes, total)}{self._bytes / 1e6:,.1f} of {total / 1e6:,.1f} MB  "
            f"{documents:,} documents  {tokens:,} tokens  {speed:,.0f} tokens/s  ETA {left}"
        )
        print(
            f"\r\033[K{line}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=self._stream,
            flush=True,
        )
        self._any = True

    def close(self) -> None:
        """End the line, so that what follows starts a new one."""
        if self._terminal and self._any:
            print(file=self._stream)


def _bar(done: int, total: int) -> str:
    filled = _BAR * done // max(1, total)
    return f"[{'#' * filled}{'.' * (_BAR - filled)}] "


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

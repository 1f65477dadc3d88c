"""The line that `cem prepare` shows on standard error while it works."""

import time
from typing import TextIO

_TERMINAL_SECONDS = 0.5
_LOG_SECONDS = 15.0


class PrepareProgress:
    """Bytes read, documents, tokens a second and the time left; rare lines when not a terminal."""

    def __init__(self, total_bytes: int, stream: TextIO):
        self._total = total_bytes
        self._stream = stream
        self._terminal = stream.isatty()
        self._every = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        self._started = self._shown = time.monotonic()
        self._bytes = 0
        self._any = False

    def read(self, position: int) -> None:
        """So many bytes on disk have been read, over all files."""
        self._bytes = position

    def made(self, documents: int, tokens: int) -> None:
        """So many documents and tokens were written; shows a line when it is time."""
        now = time.monotonic()
        if now - self._shown < self._every:
            return
        self._shown = now
        spent = now - self._started
        left = spent * (self._total - self._bytes) / max(1, self._bytes)
        line = (
            f"{self._bytes / 1e6:,.1f} of {self._total / 1e6:,.1f} MB  "
            f"{documents:,} documents  {tokens / spent:,.0f} tokens/s  ETA {_clock(left)}"
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


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

"""Standard streams for long work: closed, full or unread, they do not end it."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_STREAMS = ("stdout", "stderr")


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Within it sys.stderr takes everything, and neither stream is None.

    A progress line is for whoever reads it; when nobody does any more, a run of days goes on. What
    a command was asked for goes to standard output, and there a failure is still told.
    """
    _open_missing()
    before = sys.stderr
    sys.stderr = _Diagnostics(before)
    try:
        yield
    finally:
        sys.stderr = before


def _open_missing() -> None:
    """Point the descriptors 0 to 2 that are closed at nothing.

    The next files opened would get them, and what libraries write to "standard error" with them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    for number, name in enumerate(_STREAMS, 1):
        if getattr(sys, name) is None:
            stream = open(number, "w", closefd=False)  # noqa: SIM115 (as long as the process)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _Diagnostics:
    """A stream whose writes do not fail."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # a ValueError: it has been closed
            self._stream.write(text)
        return len(text)

    def writelines(self, lines) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

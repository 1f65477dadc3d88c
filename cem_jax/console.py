"""Standard streams that do not end long work when they are closed, full or unread."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_STREAMS = ("stdout", "stderr")


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Let sys.stderr accept everything, and neither stream be None, within the context.

    Progress lines are for whoever reads them; a run of days continues when nobody does any more.
    What a command was asked for goes to standard output, where a failure is still reported.
    """
    _open_missing()
    before = sys.stderr
    sys.stderr = _Diagnostics(before)
    try:
        yield
    finally:
        sys.stderr = before


def _open_missing() -> None:
    """Open those of the descriptors 0 to 2 that are closed on /dev/null.

    Otherwise the next files to be opened would get them, and with them what libraries write to
    standard error.
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

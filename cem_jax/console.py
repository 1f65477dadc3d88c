"""Standard streams that do not end a long run when they are closed, full or unread."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_STREAMS = ("stdout", "stderr")


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Within the context, make sys.stderr accept every write and neither stream None.

    Characters that a stream's encoding lacks are replaced, such as a table's in ASCII.

    A run of days must continue when nobody reads its progress lines any more. A command's result
    goes to standard output, where a failure is still reported.
    """
    _open_missing()
    for name in _STREAMS:
        stream = getattr(sys, name)
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    before = sys.stderr
    sys.stderr = _Diagnostics(before)
    try:
        yield
    finally:
        sys.stderr = before


def _open_missing() -> None:
    """Open /dev/null on each of the descriptors 0 to 2 that is closed.

    Otherwise the next files opened would get these numbers, and libraries would write their
    messages into them.
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
            stream = open(number, "w", closefd=False)  # noqa: SIM115 (open until the process ends)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _Diagnostics:
    """A stream whose writes do not fail."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._stream.write(text)
        return len(text)

    def writelines(self, lines) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

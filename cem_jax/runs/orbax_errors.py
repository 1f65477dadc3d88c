"""What Orbax and TensorStore say when a save or a restore fails, for users."""

import logging
import os
import re
import sys


def one_line(error: BaseException) -> str:
    """The reason in a line, the operating system's own words first."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    code = re.search(r"os_error_code='(\d+)'", text)  # TensorStore's reasons come last
    reason = "" if code is None else f"{os.strerror(int(code[1]))}: "
    return reason + (text if len(text) <= 300 else f"{text[:120]} … {text[-175:]}")


def say_once() -> None:
    """Leave it to the exceptions that reach us to tell of a failed save: not log, not print it too.

    What else Orbax logs, and every other exception, is told as before. More than once does no harm.
    """
    logging.getLogger("absl").addFilter(_RAISED_ANYWAY)
    if sys.unraisablehook is not _without_closed_loops:
        _before.append(sys.unraisablehook)
        sys.unraisablehook = _without_closed_loops


class _RaisedAnyway(logging.Filter):
    """Drops what Orbax logs, with a traceback or two, about a failure that it raises here too."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "/orbax/" in record.pathname)


_RAISED_ANYWAY = _RaisedAnyway()
_before = []  # the hook that was there


def _without_closed_loops(told) -> None:
    # After one write of a save failed, Orbax closes the event loop, and TensorStore tells of each
    # other write that it could not report to it.
    if str(told.exc_value) != "Event loop is closed":
        _before[-1](told)

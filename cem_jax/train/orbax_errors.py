"""What Orbax and TensorStore say when a save or a restore fails, for users."""

import logging
import os
import re


def one_line(error: BaseException) -> str:
    """The reason in a line, the operating system's own words first."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    code = re.search(r"os_error_code='(\d+)'", text)  # TensorStore's reasons come last
    reason = "" if code is None else f"{os.strerror(int(code[1]))}: "
    return reason + (text if len(text) <= 300 else f"{text[:120]} … {text[-175:]}")


class _RaisedAnyway(logging.Filter):
    """Drops what Orbax logs, with a traceback or two, about a failure that it raises here too."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "/orbax/" in record.pathname)


RAISED_ANYWAY = _RaisedAnyway()

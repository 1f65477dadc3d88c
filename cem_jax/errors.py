"""Exceptions that the command line reports as plain lines, without a traceback."""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """A mistake in a config, a flag or a data file, explained in plain lines.

    The command line prints each message as `cem: error: …` and exits with status 2.
    """

    def __init__(self, *messages: str):
        if not messages:
            raise ValueError("UserError needs at least one message")
        super().__init__("\n".join(messages))
        self.messages = messages


@contextlib.contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Append the messages of a UserError within the context to `problems`, and end the context."""
    try:
        yield
    except UserError as error:
        problems += error.messages


class RunFailed(Exception):
    """A run that cannot continue although the user's input is sound, such as one that diverged.

    The command line prints it as `cem: error: …` and exits with status 1.
    """

"""Exceptions that the command line reports as plain lines, without a traceback."""


class UserError(Exception):
    """A mistake in a config, a flag or a data file, explained in plain lines.

    The command line prints each message as `cem: error: …` and exits with status 2.
    """

    def __init__(self, *messages: str):
        if not messages:
            raise ValueError("UserError needs at least one message")
        super().__init__("\n".join(messages))
        self.messages = messages


class RunFailed(Exception):
    """A run that cannot continue although the user's input is sound, such as one that diverged.

    The command line prints it as `cem: error: …` and exits with status 1.
    """

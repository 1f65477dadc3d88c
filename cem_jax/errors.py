"""The one exception that means: the user's input is at fault."""


class UserError(Exception):
    """A fault in a config, a flag or a data file, told in plain lines.

    The command line prints each message as `cem: error: …` and exits with status 2.
    """

    def __init__(self, *messages: str):
        if not messages:
            raise ValueError("UserError needs at least one message")
        super().__init__("\n".join(messages))
        self.messages = messages

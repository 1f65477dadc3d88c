"""`cem <command>`: parse the arguments, run the command, and return an exit code.

Exit codes: 0 done · 2 the user's input (`cem: error: …` lines, no traceback) · 130 interrupted ·
1 anything else, including a failed verification and a step that does not fit.
"""

import argparse
import contextlib
import errno
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from cem_jax.commands import COMMANDS
from cem_jax.commands.arguments import split_overrides
from cem_jax.console import lasting
from cem_jax.errors import RunFailed, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    if os.getpid() == 1:  # as in a container, where a signal without a handler is ignored
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _raise_file_limit()
    with lasting():
        return _status(sys.argv[1:] if argv is None else argv)


def _raise_file_limit() -> None:
    """Allow as many open files as the system does: each part of a dataset is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems report more than they allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _status(argv: Sequence[str]) -> int:
    try:
        return _dispatch(parse_arguments(argv))
    except UserError as error:
        _complain(*error.messages)
        return 2
    except RunFailed as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        _drop_output()
        return 1
    except Exception as error:
        if _is_interruption(error):
            return _interrupted()
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            _complain(f"more than {limit} files are open at once; raise `ulimit -Hn`")
            return 2
        if isinstance(error, OSError) and error.filename is None and _output_fails():
            _complain(f"standard output cannot be written: {error.strerror}")
        else:
            traceback.print_exc()
        return 1


def _is_interruption(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused it: while a C module loads, it becomes an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _interrupted() -> int:
    _complain("interrupted")
    return 130


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check a command's arguments. Raises UserError with every problem found.

    A command with --config gets `overrides`, the (dotted field, text) pairs of its flags.
    """
    parser, commands = _parser()
    command = commands.get(argv[0]) if argv else None
    takes_overrides = command is not None and command.get_default("overrides") is not None
    overrides, problems = [], []
    if takes_overrides:
        argv, overrides, problems = split_overrides(argv)
    try:
        args, stray = parser.parse_known_args(argv)
    except UserError as error:
        raise UserError(*problems, *error.messages) from None
    problems += [_explain_stray(argument, takes_overrides) for argument in stray]
    if problems:
        raise UserError(*problems)
    if takes_overrides:
        args.overrides = overrides
    return args


def _dispatch(args: argparse.Namespace) -> int:
    """Run the command, print its result if --json is given, and return the exit code."""
    if not args.json:
        result = args.run(args)
    else:
        from cem_jax.text import plain

        with _stdout_to_stderr():
            result = args.run(args)
        if result is not None:
            print(json.dumps(plain(result), allow_nan=False))
    sys.stdout.flush()
    # None: another process reports the result.
    verdicts = () if result is None else (result.get("passed"), result.get("fits"))
    return 1 if any(verdict is False for verdict in verdicts) else 0


def _complain(*messages: str) -> None:
    for message in messages:
        print("cem: error:", " ".join(message.split("\n")), file=sys.stderr)


def _output_fails() -> bool:
    """Return whether standard output accepts no more, such as a file on a full disk."""
    try:
        print(flush=True)
    except OSError:
        _drop_output()
        return True
    return False


def _drop_output() -> None:
    """Discard standard output, so that the interpreter's last flush of it succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect to stderr what Python code and the libraries below it write to stdout."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of printing usage and exiting."""

    def __init__(self, **settings: Any):
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import version

        print(f"cem_jax {version('cem_jax')}")
        parser.exit()


def _explain_stray(argument: str, takes_overrides: bool) -> str:
    name = argument.lstrip("-")
    if takes_overrides and name.startswith("config."):
        return f"{argument}: an override starts with two dashes: --{name}"
    return f"unrecognized argument: {argument}"


def _parser() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    """Return the whole parser, and the commands' own parsers by name."""
    parser = _Parser(
        prog="cem", description="Pretrain and verify Causal Energy Minimization language models."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands"
    )
    for module in COMMANDS:
        importlib.import_module(f"cem_jax.commands.{module}").add(commands)
    for command in commands.choices.values():
        command.add_argument(
            "--json", action="store_true", help="print one JSON object on standard output"
        )
    return parser, commands.choices

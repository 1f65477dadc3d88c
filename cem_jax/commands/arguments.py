"""Argument types and flags that several commands share.

The types check values as configuration fields are checked; argparse reports what is wrong.
"""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

_ALMOST_URL = re.compile(r"[A-Za-z][\w+.-]+:/(?!/)|(gs|s3|hf):(?!//)")  # likely meant as a URL
_OVERRIDE = "--config."


def number(kind: type, **limits: float) -> Callable[[str], Any]:
    """Return an argparse type for an int or float within the `limits` of `config.values.Range`."""

    def convert(text: str) -> Any:
        from cem_jax.config.values import Range, parse  # slow, and unused by `cem --help`

        try:
            return parse(text, Annotated[kind, Range(**limits)])
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


COUNT = number(int, low=1)
INDEX = number(int, low=0)
SEED = number(int, low=0, high=2**32 - 1)


def text(argument: str) -> str:
    """Check a path or name, as an argparse type: not empty, valid UTF-8."""
    if not argument:
        raise argparse.ArgumentTypeError("is empty")
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not valid UTF-8") from None
    return argument


def place(argument: str) -> str:
    """Check a path or URL, as an argparse type, and expand its `~`."""
    argument = os.path.expanduser(text(argument))  # shells leave the ~ in --workdir=~/run
    if _ALMOST_URL.match(argument):
        raise argparse.ArgumentTypeError(
            f"{argument}: a URL has two slashes after its colon; for a local path, write "
            f"./{argument}"
        )
    return argument


def local_path(argument: str) -> str:
    """Check a local path, as an argparse type."""
    argument = place(argument)
    if "://" in argument:
        raise argparse.ArgumentTypeError(f"{argument}: must be a local path, not a URL")
    return argument


def add_workdir(command: argparse.ArgumentParser) -> None:
    """Add --workdir, the directory of an existing run."""
    command.add_argument(
        "--workdir", type=place, required=True, metavar="DIR", help="the run's directory"
    )


def add_step(command: argparse.ArgumentParser) -> None:
    """Add --step, the checkpoint to use."""
    command.add_argument("--step", type=INDEX, metavar="N", help="checkpoint; default: the latest")


def add_recursion(command: argparse.ArgumentParser) -> None:
    """Add --attention-steps and --mlp-steps, which replace the T the run was trained with."""
    for sublayer in ("attention", "mlp"):
        command.add_argument(
            f"--{sublayer}-steps",
            type=COUNT,
            metavar="T",
            help=f"run the {sublayer} sublayers for T steps instead",
        )


def add_config(command: argparse.ArgumentParser) -> None:
    """Add --config, one configuration file, and let --config.FIELD=VALUE override its fields."""
    command.epilog = "Any field of the configuration can be set: --config.optimizer.b1=0.9"
    command.add_argument(
        "--config",
        type=text,
        required=True,
        metavar="FILE",
        help="a Python file with get_config(), or FILE:ARGUMENT",
    )
    command.set_defaults(overrides=[])


def add_figures(command: argparse.ArgumentParser, *, required: bool) -> None:
    """Add --config and --size, the figures, and let --config.FIELD=VALUE set fields of all runs."""
    command.add_argument(
        "--config",
        type=text,
        nargs="+",
        required=required,
        metavar="FILE",
        help="Python files with get_sweep(size), or FILE:SIZE; the paper's are in configs/paper/",
    )
    command.add_argument(
        "--size",
        type=text,
        metavar="SIZE",
        help="paper: all of the paper's; mini: minutes per run; ladder: four, minutes to hours; "
        "86m … 256m, 0.3m … 2.6m: only that one",
    )
    command.set_defaults(overrides=[])


def add_inputs(command: argparse.ArgumentParser, *, required: bool) -> None:
    """Add --input and --text-column, a corpus."""
    command.add_argument(
        "--input",
        type=text,
        nargs="+",
        required=required,
        metavar="PATH",
        help="files, folders, globs, or URLs of them (gs://, s3://, hf://, with fsspec): .txt (one "
        "document per file), .jsonl, .json (an array, or lines) and .parquet, optionally "
        "compressed as .gz, .zst, .xz or .bz2",
    )
    command.add_argument(
        "--text-column",
        type=text,
        default="text",
        metavar="NAME",
        help="field of .jsonl, .json and .parquet records; a.b is field b of field a "
        "(default: %(default)s)",
    )


def split_overrides(
    arguments: Sequence[str],
) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """Separate `--config.a.b=value` and `--config.a.b value` from a command's other arguments.

    Returns the other arguments, the (dotted field, text) pairs in order, and the problems found.
    """
    rest: list[str] = []
    pairs: list[tuple[str, str]] = []
    problems: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if not argument.startswith(_OVERRIDE):
            rest.append(argument)
        elif argument.partition("=")[0] == _OVERRIDE:
            problems.append(f"{argument}: names no field; expected {_OVERRIDE}FIELD=VALUE")
        elif "=" in argument:
            name, _, value = argument.removeprefix(_OVERRIDE).partition("=")
            pairs.append((name, value))
        elif queue and not queue[0].startswith("--"):
            pairs.append((argument.removeprefix(_OVERRIDE), queue.pop(0)))
        else:
            problems.append(f"{argument}: needs a value: {argument}=VALUE")
    return rest, pairs, problems

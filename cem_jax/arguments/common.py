"""What the arguments of several commands have in common: the types of their values.

A value is read and checked as configuration fields are; what is wrong with it is a UserError.
"""

import argparse
import re
from collections.abc import Callable
from typing import Annotated, Any

from cem_jax.config.values import Range, parse

COUNT = Annotated[int, Range(low=1)]
INDEX = Annotated[int, Range(low=0)]
SEED = Annotated[int, Range(low=0, high=2**32 - 1)]
_ALMOST_URL = re.compile(r"[A-Za-z][\w+.-]+:/(?!/)|(gs|s3|hf):(?!//)")  # meant as one, likely


def value(annotation: Any) -> Callable[[str], Any]:
    """An argparse type that reads and checks a value as configuration fields do."""

    def convert(text: str) -> Any:
        try:
            return parse(text, annotation)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def text(argument: str) -> str:
    """An argparse type for paths and names: not empty, valid UTF-8."""
    if not argument:
        raise argparse.ArgumentTypeError("is empty")
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not valid UTF-8") from None
    return argument


def place(argument: str) -> str:
    """An argparse type for a path or the URL of one."""
    if _ALMOST_URL.match(text(argument)):
        raise argparse.ArgumentTypeError(
            f"{argument}: a URL has two slashes after its colon; if a local path is meant, write "
            f"./{argument}"
        )
    return argument


def local_path(argument: str) -> str:
    """An argparse type for a path that cannot be a URL."""
    if "://" in place(argument):
        raise argparse.ArgumentTypeError(f"{argument}: must be a local path, not a URL")
    return argument


def add_workdir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workdir", type=place, required=True, metavar="DIR", help="the run's directory"
    )

"""Arguments of the commands that use a trained run: eval, generate."""

import sys
from typing import Annotated, Any

from cem_jax.arguments.common import COUNT, INDEX, SEED, add_workdir, text, value
from cem_jax.config.values import Range
from cem_jax.errors import UserError


def add(commands: Any) -> None:
    evaluate = commands.add_parser("eval", help="loss, perplexity and bits per byte of a split")
    add_workdir(evaluate)
    evaluate.add_argument("--split", type=text, metavar="NAME", help="default: eval.split")
    evaluate.add_argument("--batch", type=value(COUNT), metavar="N", help="windows at a time")

    generate = commands.add_parser("generate", help="continue a prompt")
    add_workdir(generate)
    generate.add_argument(
        "--prompt", type=_prompt, metavar="TEXT", help="default: standard input, unless a terminal"
    )
    generate.add_argument("--max-tokens", type=value(INDEX), default=128, metavar="N")
    generate.add_argument(
        "--temperature",
        type=value(Annotated[float, Range(low=0)]),
        default=1.0,
        metavar="X",
        help="0: always the likeliest token (default: %(default)s)",
    )
    generate.add_argument("--top-k", type=value(COUNT), metavar="K")
    generate.add_argument(
        "--top-p", type=value(Annotated[float, Range(above=0, high=1)]), metavar="P"
    )
    generate.add_argument("--seed", type=value(SEED), default=0, metavar="N")

    for command in (evaluate, generate):
        command.add_argument(
            "--step", type=value(INDEX), metavar="N", help="checkpoint; default: the latest"
        )
        for sublayer in ("attention", "mlp"):
            command.add_argument(
                f"--{sublayer}-steps",
                type=value(COUNT),
                metavar="T",
                help=f"run the {sublayer} sublayers for T steps instead",
            )


def _prompt(argument: str) -> str:
    return text(argument) if argument else ""


def standard_input() -> str:
    """The prompt from a pipe or file, less one final newline; empty at a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt on standard input is not valid UTF-8: {error}") from None

"""`cem generate`: continue a prompt with a run's checkpoint."""

import argparse
import sys
import time
from typing import Any

from cem_jax.commands.arguments import (
    COUNT,
    INDEX,
    SEED,
    add_recursion,
    add_step,
    add_workdir,
    number,
    text,
)
from cem_jax.errors import UserError


def add(commands: Any) -> None:
    command = commands.add_parser("generate", help="continue a prompt")
    add_workdir(command)
    command.add_argument(
        "--prompt",
        type=lambda argument: text(argument) if argument else "",
        metavar="TEXT",
        help="default: standard input, unless it is a terminal",
    )
    command.add_argument("--max-tokens", type=INDEX, default=128, metavar="N")
    command.add_argument(
        "--temperature",
        type=number(float, low=0),
        default=1.0,
        metavar="X",
        help="0: always the most likely token (default: %(default)s)",
    )
    command.add_argument("--top-k", type=COUNT, metavar="K")
    command.add_argument("--top-p", type=number(float, above=0, high=1), metavar="P")
    command.add_argument("--seed", type=SEED, default=0, metavar="N")
    add_step(command)
    add_recursion(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the continuation to stdout as it is generated, unless `args.json`, and return it.

    Raises UserError, before any work, for a run or checkpoint that does not exist and for a prompt
    longer than the context.
    """
    prompt = standard_input() if args.prompt is None else args.prompt
    from dataclasses import replace

    from cem_jax.config import with_steps
    from cem_jax.runs.generation import Generator, Sampling, prompt_ids
    from cem_jax.runs.run import Run

    run = Run.open(args.workdir, args.step)
    prompt_ids(run.config, run.tokenizer, prompt)
    model = with_steps(run.config.model, args.attention_steps, args.mlp_steps)
    generator = Generator(replace(run.config, model=model), run.parameters, run.tokenizer)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    started = time.monotonic()
    write = (lambda text: None) if args.json else _write
    result = generator(prompt, args.max_tokens, sampling, write)
    write("\n")
    seconds = time.monotonic() - started
    reasons = {
        "separator": "the document ended",
        "length": "--max-tokens reached",
        "context": f"the context of {run.config.data.context} tokens is full",
    }
    print(
        f"step {run.step}: {result.tokens} tokens in {seconds:.1f} s; {reasons[result.stop]}",
        file=sys.stderr,
    )
    return result._asdict() | {"step": run.step}


def standard_input() -> str:
    """Return the prompt from a pipe or file without its final newline; empty at a terminal.

    Raises UserError when it is not UTF-8.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt on standard input is not valid UTF-8: {error}") from None


def _write(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except UnicodeEncodeError:  # the terminal does not use UTF-8
        print(text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding), end="")

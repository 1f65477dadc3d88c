"""`cem eval`: loss, perplexity and bits per byte of a whole split."""

import argparse
import sys
from typing import Any, TextIO

from cem_jax.commands.arguments import COUNT, add_recursion, add_step, add_workdir, place, text


def add(commands: Any) -> None:
    command = commands.add_parser("eval", help="loss, perplexity and bits per byte of a split")
    add_workdir(command)
    command.add_argument("--split", type=text, metavar="NAME", help="default: eval.split")
    command.add_argument(
        "--data",
        type=place,
        metavar="DIR",
        help="another dataset, or where the run's is now; default: data.path or data.mixture",
    )
    command.add_argument("--batch", type=COUNT, metavar="N", help="windows per batch")
    add_step(command)
    add_recursion(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate, print the results and return them. Raises what `evaluate` raises."""
    from cem_jax.runs.evaluation import evaluate

    result = evaluate(
        args.workdir,
        step=args.step,
        split=args.split,
        data=args.data,
        batch=args.batch,
        attention_steps=args.attention_steps,
        mlp_steps=args.mlp_steps,
    )
    print_result(result, sys.stderr if args.json else sys.stdout)
    return result


def _why_no_bits(values: dict[str, Any]) -> str:
    if "unknown" in values:
        return f"no bits per byte: {values['unknown']:,} tokens are unknown pieces"
    return "bytes unknown"


def print_result(result: dict[str, Any], out: TextIO) -> None:
    """Print the loss, perplexity and bits per byte of each source and of the whole."""
    from cem_jax.text import format_count, format_duration

    sources = result.get("sources", {})
    for name, values in {**sources, f"{result['split']}, step {result['step']}": result}.items():
        bits = values["bits_per_byte"]
        print(
            f"{name}: loss {values['loss']:.4f}, perplexity {values['perplexity']:.2f}, "
            + (f"{bits:.4f} bits per byte" if bits is not None else _why_no_bits(values))
            + f" ({values['tokens']:,} tokens, {values['bytes']:,} bytes)",
            file=out,
        )
    rate = result["tokens"] / max(result["seconds"], 1e-9)
    print(f"{format_duration(result['seconds'])}, {format_count(rate)} tokens/s", file=out)

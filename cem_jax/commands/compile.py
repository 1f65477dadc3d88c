"""`cem compile`: compile the training step ahead of time: does it fit, and how fast is it?"""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from cem_jax.commands.arguments import add_config, text

if TYPE_CHECKING:
    from cem_jax.aot.step import Compiled
    from cem_jax.aot.topology import Topology
    from cem_jax.config import Config


def add(commands: Any) -> None:
    command = commands.add_parser(
        "compile", help="compile the training step for hardware you do not have: does it fit?"
    )
    add_config(command)
    command.add_argument(
        "--topology",
        type=text,
        required=True,
        metavar="NAME",
        help="TPUs such as v5e:16x16 or v5p:4x4x4, GPUs such as H100:8, or cpu:N",
    )
    command.add_argument(
        "--suggest",
        action="store_true",
        help="try other meshes, remat policies and microbatches; recommend one",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the findings and return them.

    Raises UserError for a faulty configuration, an unknown topology or a missing compiler.
    """
    from cem_jax.aot.report import described, rendered, rendered_choice
    from cem_jax.aot.suggest import overrides_of, suggestions
    from cem_jax.aot.topology import open_topology
    from cem_jax.config import load_config

    config = load_config(args.config, args.overrides)
    topology = open_topology(args.topology)
    if not args.suggest:
        found = described(config, topology, _compile_aloud(config, topology))
        print(rendered(found))
        return found
    rows, best = suggestions(config, topology, _compile_aloud)
    chosen = rows[best]
    found = described(chosen.config, topology, chosen.compiled)
    found |= {
        "suggestions": [row.summary() for row in rows],
        "recommended": overrides_of(config, chosen.config) if chosen.compiled.fits else None,
    }
    print(rendered_choice(found, best))
    print()
    print(rendered(found))
    return found


def _compile_aloud(config: "Config", topology: "Topology") -> "Compiled":
    """Call `compile_step`, which may take minutes, and announce it on stderr."""
    from cem_jax.aot.step import compile_step

    sizes = config.to_dict()["mesh"].items()
    mesh = ", ".join(f"{axis} {size}" for axis, size in sizes if size != 1) or "of one device"
    rows = config.train.microbatch or config.train.global_batch
    shown = (
        f"mesh {mesh}; {config.train.global_batch} sequences of {config.data.context}, {rows} at a "
        f"time; remat {config.model.remat}"
    )
    print(f"compiling for {topology.name}: {shown} …", end="", file=sys.stderr, flush=True)
    try:
        compiled = compile_step(config, topology)
    except BaseException as error:
        print(f" {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)
        raise
    verdict = "fits" if compiled.fits else "does not fit"
    print(f" {compiled.seconds:.0f} s, {verdict}", file=sys.stderr, flush=True)
    return compiled

"""`cem verify`: check that layer updates are the gradients of their energies."""

import argparse
from typing import Any

from cem_jax.commands.arguments import add_config


def add(commands: Any) -> None:
    command = commands.add_parser(
        "verify", help="check that layer updates are the gradients of their energies"
    )
    add_config(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table of checks and return it; `passed` is False if a check fails.

    Raises UserError on a faulty configuration.
    """
    from cem_jax.config import load_config
    from cem_jax.verify import verify

    return verify(load_config(args.config, args.overrides))

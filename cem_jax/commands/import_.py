"""`cem import`: make a run directory from an export."""

import argparse
import sys
from typing import Any

from cem_jax.commands.arguments import local_path


def add(commands: Any) -> None:
    command = commands.add_parser("import", help="make a run directory from an export")
    command.add_argument(
        "--input", type=local_path, required=True, metavar="DIR", help="what `cem export` wrote"
    )
    command.add_argument(
        "--workdir", type=local_path, required=True, metavar="DIR", help="a new local directory"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the run; return {files, parameters, step}. Raises what `import_run` raises."""
    from cem_jax.runs.export import import_run

    result = import_run(args.input, args.workdir)
    print(
        f"{args.workdir}: checkpoint {result['step']}, {result['parameters']:,} parameters; for "
        "`cem eval`, `cem generate` and `cem train --init-from`",
        file=sys.stderr if args.json else sys.stdout,
    )
    return result

"""`cem export`: write a run's parameters as safetensors."""

import argparse
import sys
from pathlib import Path
from typing import Any

from cem_jax.commands.arguments import add_step, add_workdir, local_path


def add(commands: Any) -> None:
    command = commands.add_parser("export", help="write a run's parameters as safetensors")
    add_workdir(command)
    command.add_argument(
        "--output", type=local_path, required=True, metavar="DIR", help="a new local directory"
    )
    add_step(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the export; return {files, parameters, step}. Raises what `export_run` raises."""
    from cem_jax.runs.export import export_run

    result = export_run(args.workdir, args.output, step=args.step)
    files = [Path(file) for file in result["files"]]
    size = sum(file.stat().st_size for file in files)
    print(
        f"{args.output}: checkpoint {result['step']}, {result['parameters']:,} parameters, "
        f"{size / 1e6:.1f} MB in {', '.join(file.name for file in files)}",
        file=sys.stderr if args.json else sys.stdout,
    )
    return result

"""`cem report`: draw figures from the runs that exist, as images, tables and one page."""

import argparse
import sys
from typing import Any

from cem_jax.commands.arguments import add_figures, local_path, place


def add(commands: Any) -> None:
    command = commands.add_parser(
        "report",
        help="draw figures from the runs that exist: PNG, CSV and one HTML page",
        epilog="Repeat the fields that the sweep set for all runs: --config.FIELD=VALUE",
    )
    command.add_argument(
        "--workdir",
        type=place,
        required=True,
        metavar="DIR",
        help="a sweep's directory, or one of the files that `cem sweep --results` kept",
    )
    command.add_argument("--output", type=local_path, metavar="DIR", help="default: WORKDIR/report")
    add_figures(command, required=False)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the report and return its tables. Raises what `report` raises."""
    from cem_jax.studies.figures.report import report

    return report(
        args.workdir,
        args.output,
        files=args.config or (),
        size=args.size,
        overrides=args.overrides,
        out=sys.stderr if args.json else sys.stdout,
    )

"""`cem sweep`: train the runs of figures in sequence, or print commands for a job array."""

import argparse
from typing import Any

from cem_jax.commands.arguments import COUNT, add_figures, place


def add(commands: Any) -> None:
    command = commands.add_parser(
        "sweep",
        help="train all runs of figures; rerun the command to resume",
        epilog="""A field that no figure compares can be set for all runs: --config.data.path=DIR
One that changes what is trained, such as model.dim, also changes the name of each run's
directory, which contains a hash of such fields. The size keeps its name: with
--config.model.dim=32 labels still say mini.""",
    )
    add_figures(command, required=True)
    command.add_argument(
        "--workdir", type=place, required=True, metavar="DIR", help="holds one directory per run"
    )
    command.add_argument(
        "--seeds",
        type=COUNT,
        default=1,
        metavar="N",
        help="run each arm with seeds 0 to N - 1, all arms of a seed before the next (default: 1)",
    )
    command.add_argument(
        "--rates",
        type=float,
        nargs="+",
        metavar="X",
        help="run only these of a figure's learning rates, as multiples of the size's own: "
        "--seeds 3 --rates 1 2 repeats the two near the best (default: all)",
    )
    command.add_argument(
        "--results",
        type=place,
        metavar="DIR",
        help="also keep a small JSON file per run here, and skip runs whose file exists",
    )
    command.add_argument(
        "--print-commands",
        action="store_true",
        help="run nothing; print the `cem train` command of each unfinished run",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the sweep and return {runs: the table, passed: whether no run failed}, or {commands: …}.

    Raises UserError, before anything runs, for a mistake in a figure, a flag or the data.
    """
    from cem_jax.studies.figures.grid import at_rates, read_sweep, runs_of
    from cem_jax.studies.figures.sweep import commands, sweep

    sweeps = [read_sweep(path, args.size) for path in args.config]
    if args.rates:
        sweeps = at_rates(sweeps, args.rates)
    runs = runs_of(sweeps, range(args.seeds), args.overrides)
    if not args.print_commands:
        return sweep(runs, args.workdir, args.results)
    lines = commands(runs, args.workdir, args.results)
    if not args.json:
        print(*lines, sep="\n")
    return {"commands": lines}

"""Arguments of the experiments: sweep and report."""

import argparse
from typing import Any

from cem_jax.arguments.common import COUNT, text, value


def add(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="train all runs of figures; the same command again goes on",
        epilog="A field that no figure compares can be set for all runs: --config.data.path=DIR",
    )
    _add_figures(sweep, required=True)
    sweep.add_argument(
        "--workdir", type=text, required=True, metavar="DIR", help="holds a directory a run"
    )
    sweep.add_argument(
        "--seeds",
        type=value(COUNT),
        default=1,
        metavar="N",
        help="run each arm with seeds 0 to N - 1, all arms of a seed before the next (default: 1)",
    )
    sweep.add_argument(
        "--results",
        type=text,
        metavar="DIR",
        help="also keep a small JSON file a run here; runs whose file is there are skipped",
    )
    sweep.add_argument(
        "--print-commands",
        action="store_true",
        help="run nothing; print the `cem train` command of each run that is not finished",
    )


def _add_figures(command: argparse.ArgumentParser, required: bool) -> None:
    command.add_argument(
        "--config",
        type=text,
        nargs="+",
        required=required,
        metavar="FILE",
        help="Python files with get_sweep(size), or FILE:SIZE; configs/paper/ has the paper's",
    )
    command.add_argument(
        "--size",
        type=text,
        metavar="SIZE",
        help="paper: all the paper's; mini: minutes a run; 86m … 256m: that one",
    )

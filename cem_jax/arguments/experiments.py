"""Arguments of the experiments: sweep, report and synthetic."""

import argparse
from typing import Any

from cem_jax.arguments.common import COUNT, local_path, place, text, value

_KERNELS = ("rbf", "matern", "periodic", "rational_quadratic", "non_stationary")


def add(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="train all runs of figures; the same command again goes on",
        epilog="""A field that no figure compares can be set for all runs: --config.data.path=DIR
One that changes what is trained, such as model.dim, also changes the name of each run's
directory, which has a hash of such fields in it. The size's name stays: with
--config.model.dim=32 labels still say mini.""",
    )
    _add_figures(sweep, required=True)
    sweep.add_argument(
        "--workdir", type=place, required=True, metavar="DIR", help="holds a directory a run"
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
        type=place,
        metavar="DIR",
        help="also keep a small JSON file a run here; runs whose file is there are skipped",
    )
    sweep.add_argument(
        "--print-commands",
        action="store_true",
        help="run nothing; print the `cem train` command of each run that is not finished",
    )

    _add_synthetic(commands)

    report = commands.add_parser(
        "report",
        help="draw figures from the runs that are there: PNG, CSV and one HTML page",
        epilog="Fields that the sweep set for all runs are to be given again: --config.FIELD=VALUE",
    )
    report.add_argument(
        "--workdir",
        type=place,
        required=True,
        metavar="DIR",
        help="a sweep's directory, or one of the files that `cem sweep --results` kept",
    )
    report.add_argument("--output", type=local_path, metavar="DIR", help="default: WORKDIR/report")
    _add_figures(report, required=False)


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


def _add_synthetic(commands: Any) -> None:
    synthetic = commands.add_parser(
        "synthetic",
        help="Table 3: recursion on functions drawn from Gaussian processes",
        description="Six small regressors on functions drawn from Gaussian processes. Finished "
        "kernels are kept in the work directory; the same command again goes on.",
    )
    synthetic.add_argument(
        "--kernels", nargs="+", choices=_KERNELS, default=_KERNELS, metavar="NAME",
        help=f"of {', '.join(_KERNELS)} (default: all)",
    )  # fmt: skip
    synthetic.add_argument(
        "--seeds", type=value(COUNT), default=3, metavar="N", help="functions of each kernel (3)"
    )
    synthetic.add_argument(
        "--steps", type=value(COUNT), default=10_000, metavar="N", help="of training (10000)"
    )
    synthetic.add_argument(
        "--points", type=value(COUNT), default=20_000, metavar="N", help="to train on (20000)"
    )
    synthetic.add_argument(
        "--workdir",
        type=local_path,
        default="runs/table3",
        metavar="DIR",
        help="default: %(default)s",
    )
    synthetic.add_argument(
        "--dry-run",
        action="store_true",
        help="show each model's parameters, and FLOPs of a forward pass of 100 points; then stop",
    )

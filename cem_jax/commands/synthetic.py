"""`cem synthetic`: regression of functions drawn from Gaussian processes (Table 3)."""

import argparse
import sys
from pathlib import Path
from typing import Any

from cem_jax.commands.arguments import COUNT, local_path

KERNELS = ("rbf", "matern", "periodic", "rational_quadratic", "non_stationary")


def add(commands: Any) -> None:
    command = commands.add_parser(
        "synthetic",
        help="Table 3: recursion on functions drawn from Gaussian processes",
        description="Six small regressors on functions drawn from Gaussian processes. Finished "
        "kernels are kept in the work directory; rerun the command to resume.",
    )
    command.add_argument(
        "--kernels", nargs="+", choices=KERNELS, default=KERNELS, metavar="NAME",
        help=f"any of {', '.join(KERNELS)} (default: all)",
    )  # fmt: skip
    command.add_argument(
        "--seeds", type=COUNT, default=3, metavar="N", help="functions per kernel (3)"
    )
    command.add_argument(
        "--steps", type=COUNT, default=10_000, metavar="N", help="training steps (10000)"
    )
    command.add_argument(
        "--points", type=COUNT, default=20_000, metavar="N", help="training points (20000)"
    )
    command.add_argument(
        "--workdir",
        type=local_path,
        default="runs/table3",
        metavar="DIR",
        help="default: %(default)s",
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="show each model's parameters and FLOPs of a forward pass of 100 points, then stop",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table and return it. Raises what `study` raises."""
    from cem_jax.studies.figures.rows import write_json
    from cem_jax.studies.synthetic.models import MODELS, sizes
    from cem_jax.studies.synthetic.report import draw, rendered
    from cem_jax.studies.synthetic.study import Settings, study

    models = {name: sizes(model) for name, model in MODELS.items()}
    if args.dry_run:
        print(rendered(models, {}))
        return {"models": models}
    settings, workdir = Settings(args.seeds, args.steps, args.points), Path(args.workdir)
    kernels = study(workdir, list(args.kernels), settings, sys.stderr)
    result = {"models": models, "settings": settings._asdict(), "kernels": kernels}
    write_json(workdir / "table.json", result)
    draw(kernels, workdir / "table.png")
    print(rendered(models, kernels))
    return result

"""`cem train`: pretrain a model, or resume a run."""

import argparse
from typing import Any

from cem_jax.commands.arguments import COUNT, INDEX, add_config, add_workdir, place, text


def add(commands: Any) -> None:
    command = commands.add_parser("train", help="pretrain; rerun the command to resume")
    add_config(command)
    add_workdir(command)
    command.add_argument(
        "--init-from",
        type=place,
        metavar="RUN",
        help="start from the parameters of this run's newest checkpoint, matched by name",
    )
    group = command.add_argument_group(
        "several processes", "Not needed under SLURM or on TPU VMs; see launch/README.md."
    )
    group.add_argument("--coordinator", type=text, metavar="HOST:PORT", help="process 0's")
    group.add_argument("--processes", type=COUNT, metavar="N", help="their number")
    group.add_argument("--process", type=INDEX, metavar="I", help="this one's index, from 0")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Train to the end; return {step, loss, checkpoint}, or None in all processes but the first.

    Raises what `train` raises, and UserError for a faulty configuration or process flags.
    """
    from cem_jax.config import load_config
    from cem_jax.distributed.cluster import find_cluster
    from cem_jax.runs.training import train_in_processes

    config = load_config(args.config, args.overrides)
    cluster = find_cluster(args.coordinator, args.processes, args.process)
    return train_in_processes(config, args.workdir, cluster, init_from=args.init_from)

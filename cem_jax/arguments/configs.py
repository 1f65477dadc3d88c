"""Arguments of the commands that take a configuration: train, verify, inspect, compile."""

import argparse
from typing import Any

from cem_jax.arguments.common import COUNT, INDEX, add_workdir, place, text, value


def add(commands: Any) -> None:
    for name, words in (
        ("train", "pretrain; the same command again resumes"),
        ("verify", "check that layer updates are the gradients of their energies"),
        ("inspect", "count parameters, FLOPs and memory, beside the Llama twin"),
        ("compile", "compile the training step for hardware that is not here: does it fit?"),
    ):
        command = commands.add_parser(
            name,
            help=words,
            epilog="Any field of the configuration can be set: --config.optimizer.b1=0.9",
        )
        command.add_argument(
            "--config",
            type=text,
            required=True,
            metavar="FILE",
            help="a Python file with get_config(), or FILE:ARGUMENT",
        )
        if name == "train":
            add_workdir(command)
            command.add_argument(
                "--init-from",
                type=place,
                metavar="RUN",
                help="begin with the parameters of this run's newest checkpoint, by name",
            )
            _add_processes(command)
        if name == "inspect":
            command.add_argument(
                "--devices",
                type=value(COUNT),
                metavar="N",
                help="lay the parameters out on so many; default: the fewest the mesh allows",
            )
        if name == "compile":
            _add_topology(command)


def _add_processes(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "several processes", "Not needed under SLURM or on TPU VMs; see launch/README.md."
    )
    group.add_argument("--coordinator", type=text, metavar="HOST:PORT", help="of process 0")
    group.add_argument("--processes", type=value(COUNT), metavar="N", help="how many there are")
    group.add_argument("--process", type=value(INDEX), metavar="I", help="this one, from 0")


def _add_topology(command: argparse.ArgumentParser) -> None:
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

"""Arguments of the commands that hand parameters over and take them: export, import."""

from typing import Any

from cem_jax.arguments.common import INDEX, add_workdir, text, value


def add(commands: Any) -> None:
    export = commands.add_parser("export", help="write a run's parameters as safetensors")
    add_workdir(export)
    export.add_argument("--output", type=text, required=True, metavar="DIR", help="a new directory")
    export.add_argument(
        "--step", type=value(INDEX), metavar="N", help="checkpoint; default: the latest"
    )

    importing = commands.add_parser("import", help="make a run directory of an export")
    importing.add_argument(
        "--input", type=text, required=True, metavar="DIR", help="what `cem export` wrote"
    )
    add_workdir(importing)

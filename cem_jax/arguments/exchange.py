"""Arguments of the commands that hand parameters over and take them: export, import."""

from typing import Any

from cem_jax.arguments.common import INDEX, add_workdir, local_path, value


def add(commands: Any) -> None:
    export = commands.add_parser("export", help="write a run's parameters as safetensors")
    add_workdir(export)
    export.add_argument(
        "--output", type=local_path, required=True, metavar="DIR", help="a new local directory"
    )
    export.add_argument(
        "--step", type=value(INDEX), metavar="N", help="checkpoint; default: the latest"
    )

    importing = commands.add_parser("import", help="make a run directory of an export")
    importing.add_argument(
        "--input", type=local_path, required=True, metavar="DIR", help="what `cem export` wrote"
    )
    importing.add_argument(
        "--workdir", type=local_path, required=True, metavar="DIR", help="a new local directory"
    )

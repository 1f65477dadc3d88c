"""Which part of the package may import which, and that every file can be read in one sitting."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cem_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))
FILES = sorted(
    path
    for folder in ("cem_jax", "configs", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)

CONFIG = {"config", "config_file", "config_names", "config_rules", "overrides"}
LIBRARY = {"kernels", "energy", "model", "train", "data", "parallel", "experiments", "errors"}

# layer: the other layers it may import
ALLOWED = {
    "root": set(),
    "errors": set(),
    "console": set(),
    "kernels": set(),
    "energy": {"kernels"},
    "config": {"errors"},
    "data": {"errors"},
    "parallel": {"errors", "config"},
    "model": {"energy", "kernels", "config", "errors"},
    "train": {"model", "energy", "kernels", "data", "parallel", "config", "errors"},
}
# Commands (verify, evaluate, generate, summary, demo, …) and experiments may import all but cli.
ALLOWED["experiments"] = {*ALLOWED, "commands"}
ALLOWED["commands"] = {*ALLOWED, "experiments"}
ALLOWED["arguments"] = {"errors", "config"}
ALLOWED["cli"] = {"arguments", "console", "errors", "config"}
ALLOWED["main"] = {"cli"}

# Files that take plain arguments, so that they can be used without a configuration.
WITHOUT_CONFIG = ("train/checkpoint.py", "train/metrics.py")


def layer(module):
    """The layer of `cem_jax.a.b`."""
    first = module.split(".")[1] if "." in module else ""
    if first in CONFIG:
        return "config"
    if first in LIBRARY or first in {"cli", "arguments", "console"}:
        return first
    return {"": "root", "__main__": "main"}.get(first, "commands")


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path):
    """The modules of this package that the file imports anywhere, functions included."""
    name = name_of(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (above, node.module) if part)
            # `from cem_jax import data` names the module in what it takes
            deeper = module == "cem_jax"
            names = [f"{module}.{alias.name}" for alias in node.names] if deeper else [module]
        else:
            continue
        yield from (n for n in names if n.partition(".")[0] == "cem_jax")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    here = layer(name_of(path))
    allowed = ALLOWED[here] | {here}
    wrong = [name for name in imported(path) if layer(name) not in allowed]
    assert not wrong, f"{here} may import {sorted(allowed)} only"


@pytest.mark.parametrize("file", WITHOUT_CONFIG)
def test_no_configuration_needed(file):
    path = PACKAGE / file
    assert not [name for name in imported(path) if layer(name) == "config"]


def test_energy_and_kernels_know_no_modules_of_flax():
    for path in [*(PACKAGE / "energy").rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")]:
        roots = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not roots & {"flax", "ml_collections", "optax", "orbax"}, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 400

"""Which part of the package may import which: imports go one way."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cem_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))

BASE = {"errors", "text"}

# room: the other rooms it may import
ALLOWED: dict[str, set[str]] = {
    "cem_jax": set(),
    "errors": set(),
    "text": {"errors"},
    "console": set(),
    "config": {"sharding", *BASE},  # which fields a mesh must divide
    "storage": BASE,
    "sharding": BASE,
    "kernels": {"sharding"},
    "energy": {"kernels", "sharding"},
    "model": {"energy", "kernels", "sharding", "config", *BASE},
    "distributed": {"sharding", "storage", "config", *BASE},
}
ALLOWED["data.dataset"] = {"storage", "config", *BASE}
ALLOWED["data.corpus"] = {"data.dataset", "storage", "config", *BASE}
ALLOWED["train"] = {
    "model",
    "energy",
    "kernels",
    "sharding",
    "distributed",
    "data.dataset",
    "config",
    *BASE,
}
ALLOWED["runs"] = {"train", "storage", *ALLOWED["train"]}
ALLOWED["aot"] = {"train", *ALLOWED["train"]}
ALLOWED["verify"] = {"model", "energy", "kernels", "sharding", "config", *BASE}
ALLOWED["studies"] = {"runs", "data.corpus", *ALLOWED["runs"]}
ALLOWED["commands"] = {*ALLOWED} - {"cem_jax"}
ALLOWED["cli"] = {"commands", "console", "config", *BASE}
ALLOWED["__main__"] = {"cli"}


def room(module: str) -> str:
    """The room of `cem_jax.a.b`: its first folder, or its first two below data/."""
    names = module.split(".")[1:]
    if not names:
        return "cem_jax"
    return ".".join(names[:2]) if names[0] == "data" and len(names) > 1 else names[0]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path):
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
            deeper = module in ("cem_jax", "cem_jax.data")
            names = [f"{module}.{alias.name}" for alias in node.names] if deeper else [module]
        else:
            continue
        yield from (n for n in names if n.partition(".")[0] == "cem_jax")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    here = room(name_of(path))
    allowed = ALLOWED.get(here, set()) | {here}
    wrong = [name for name in imported(path) if room(name) not in allowed]
    assert not wrong, f"{here} may import {sorted(allowed)} only"


def test_energy_and_kernels_know_no_libraries_of_modules_or_training():
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

"""`cem import`: what `cem export` wrote becomes a run directory again, bit for bit.

Eval, generate and `cem train --init-from` work on it. It has no optimizer state, so that training
cannot go on where it was; a new run can begin with its parameters.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from cem_jax.commands.export import METADATA, made_whole, new_directory
from cem_jax.config import Config
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.checkpoint import Checkpointer
from cem_jax.runs.directory import EXPORTED, read_config, write_run_files
from cem_jax.runs.integrity import LIST_NAME, find_damage
from cem_jax.runs.tree_names import describe, named_leaves, nested

_SHOWN = 20  # problems told one by one
_LAST_STEP = 2**31 - 1  # a run counts its steps in 32 bits


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the run directory `args.workdir` of the export in `args.input`.

    Returns {files, parameters, step}. Raises UserError, with nothing written, for a directory that
    holds no export, a damaged one, and parameters that are not those of its configuration.
    """
    source = Path(args.input)
    workdir = new_directory("--workdir", args.workdir)
    _require_files(source)
    config = read_config(epath.Path(source))
    tokenizer = Tokenizer.load(source / "tokenizer.model")
    arrays, metadata = read_weights(source / EXPORTED)
    step = _step(metadata, str(source / EXPORTED))
    if metadata.get("tokenizer_hash") not in (None, tokenizer.hash):
        raise UserError(
            f"{source / 'tokenizer.model'} is {tokenizer.hash}, but {EXPORTED} was trained with "
            f"{metadata['tokenizer_hash']}"
        )
    parameters = stacked(arrays, config, str(source / EXPORTED))
    _require_finite(arrays, str(source / EXPORTED))
    extra = {
        "config": config.to_dict(),
        "tokenizer_hash": tokenizer.hash,
        "separator": config.data.separator,
        "imported": True,
    }
    with made_whole(workdir) as partial:
        write_run_files(epath.Path(partial), config, tokenizer.model_bytes)
        with Checkpointer(partial / "checkpoints", keep=1, keep_best=False) as checkpoints:
            checkpoints.save(step, {"params": parameters}, extra)
    files = sorted(str(path) for path in workdir.rglob("*") if path.is_file())
    count = pure.count(config.model)
    print(
        f"{workdir}: checkpoint {step}, {count:,} parameters; for `cem eval`, `cem generate` and "
        "`cem train --init-from`",
        file=sys.stderr if args.json else sys.stdout,
    )
    return {"files": files, "parameters": count, "step": step}


def read_weights(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays by name, what `cem export` says of them).

    Raises UserError when it is no safetensors file that `cem export` wrote.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {}).get(METADATA, "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: no readable safetensors file: {error}") from None
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: was not written by `cem export`: no metadata {METADATA!r}")
    return arrays, metadata


def stacked(arrays: Mapping[str, np.ndarray], config: Config, where: str) -> pure.Parameters:
    """The parameter tree of `export.layer_by_layer`'s arrays.

    Raises UserError, naming them, when they are not the configuration's in name, shape and dtype.
    """
    wanted = named_leaves(pure.abstract_parameters(config.model))
    expected = {
        dotted: describe(leaf) for name in wanted for dotted, leaf in _parts(name, wanted[name])
    }
    found = {name: describe(array) for name, array in arrays.items()}
    problems = [
        f"{name}: {found.get(name, 'absent')} in the file, {expected.get(name, 'absent')} expected"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if problems:
        raise UserError(f"{where}: not the parameters of config.json:", *_first(problems))
    tree = {}
    for name, leaf in wanted.items():
        parts = [arrays[dotted] for dotted, _ in _parts(name, leaf)]
        tree[name] = np.stack(parts) if name.startswith("blocks/") else parts[0]
    return nested(tree)


def _step(metadata: Mapping[str, Any], where: str) -> int:
    step = metadata.get("step", 0)
    if type(step) is not int or not 0 <= step <= _LAST_STEP:
        raise UserError(
            f"{where}: its step must be a whole number from 0 to {_LAST_STEP:,}, not "
            f"{json.dumps(step)}"
        )
    return step


def _require_finite(arrays: Mapping[str, np.ndarray], where: str) -> None:
    """No checkpoint of a run holds others (docs/checkpoints.md)."""
    bad = {name: np.count_nonzero(~np.isfinite(array)) for name, array in arrays.items()}
    found = [f"{name}: {count:,} of {arrays[name].size:,}" for name, count in bad.items() if count]
    if found:
        raise UserError(f"{where}: parameters that are not finite:", *_first(found))


def _first(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"… and {more} more"] if more > 0 else [])]


def _parts(name: str, leaf: jax.ShapeDtypeStruct) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """(name, shape and dtype) of the arrays in a file that make up the parameter `name`."""
    first, *rest = name.split("/")
    if first != "blocks":
        return [(".".join([first, *rest]), leaf)]
    one = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return [(".".join([first, str(layer), *rest]), one) for layer in range(leaf.shape[0])]


def _require_files(source: Path) -> None:
    names = (EXPORTED, "config.json", "tokenizer.model")
    missing = [name for name in names if not (source / name).is_file()]
    if missing:
        raise UserError(
            f"--input {source}: holds no {' and no '.join(missing)}; name a directory that "
            "`cem export` wrote"
        )
    if (source / LIST_NAME).exists():
        damage = find_damage(epath.Path(source))
        if damage is not None:
            raise UserError(f"--input {source} is damaged: {damage}")

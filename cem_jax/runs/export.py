"""Exports: a run's parameters as safetensors, with configuration and tokenizer beside them.

    model.safetensors    each parameter under its dotted name, layer by layer (docs/export.md)
    config.json          the run's configuration, as in its directory
    tokenizer.model      SentencePiece
    checksums.sha256     for `sha256sum -c`

The safetensors file's metadata holds the step, tokenizer hash and separator, as JSON under
`cem_jax`. Exports of a checkpoint are byte-identical. An import restores the parameters bit for
bit, but no optimizer state: training cannot resume from it, but a new run can begin with it.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cem_jax.config import Config
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.arrays import dtype_and_shape, named_leaves, nested
from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.directory import EXPORTED, read_config, write_run_files
from cem_jax.runs.integrity import LIST_NAME, find_damage, write_checksums
from cem_jax.runs.position import Position
from cem_jax.runs.run import Run
from cem_jax.storage.durable import new_directory
from cem_jax.storage.paths import any_path

METADATA = "cem_jax"  # a single key: the library writes several in random order
_PARTIAL = ".cem.partial"  # filled first, if the output directory exists
_SHOWN = 20  # problems listed one by one
_LAST_STEP = 2**31 - 1  # a run counts its steps in 32 bits


def export_run(
    workdir: str | os.PathLike[str], output: str | os.PathLike[str], *, step: int | None = None
) -> dict[str, Any]:
    """Export a checkpoint (None: the newest) of the run in `workdir` to the new directory `output`.

    Returns {files, parameters, step}. Raises UserError for a missing run or checkpoint, and if
    `output` is not empty.
    """
    output = new_directory("--output", output, but_for=_PARTIAL)
    run = Run.open(workdir, step)
    metadata = {
        "step": run.step,
        "tokenizer_hash": run.tokenizer.hash,
        "separator": run.trained.data.separator,
    }
    with made_whole(output) as partial:
        write_run_files(partial, run.trained, run.tokenizer.model_bytes)
        write_weights(partial / EXPORTED, layer_by_layer(run.parameters), metadata)
        write_checksums(partial)
    files = sorted(str(path) for path in output.iterdir())
    return {"files": files, "parameters": pure.count(run.trained.model), "step": run.step}


def import_run(source: str | os.PathLike[str], workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Make a run directory, with one checkpoint of only parameters, from an export.

    Returns {files, parameters, step}. Raises UserError, with nothing written, if `source` is not an
    export, is damaged, or its parameters do not fit its configuration.
    """
    source = any_path(source)
    workdir = new_directory("--workdir", workdir, but_for=_PARTIAL)
    _require_files(source)
    config = read_config(source)
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
    position = Position(
        step,
        imported=True,
        config=config.to_dict(),
        tokenizer_hash=tokenizer.hash,
        separator=config.data.separator,
    )
    with made_whole(workdir) as partial:
        write_run_files(partial, config, tokenizer.model_bytes)
        with Writer(partial / "checkpoints", keep=1, keep_best=False) as checkpoints:
            checkpoints.save({"params": parameters}, position)
    files = sorted(str(path) for path in workdir.rglob("*") if path.is_file())
    return {"files": files, "parameters": pure.count(config.model), "step": step}


def layer_by_layer(parameters: pure.Parameters) -> dict[str, np.ndarray]:
    """Return the parameters by dotted name, with stacked layers split.

    `blocks/mlp/tied` of shape [L, M, D] becomes `blocks.0.mlp.tied` … of shape [M, D].
    """
    named: dict[str, np.ndarray] = {}
    for name, leaf in named_leaves(jax.device_get(parameters)).items():
        first, _, rest = name.replace("/", ".").partition(".")
        if first == "blocks":
            for layer, part in enumerate(leaf):
                named[f"blocks.{layer}.{rest}"] = np.array(part)
        else:
            named[name.replace("/", ".")] = leaf
    return named


def stacked(arrays: Mapping[str, np.ndarray], config: Config, where: str) -> pure.Parameters:
    """Return the parameter tree of `layer_by_layer`'s arrays.

    Raises UserError listing the names, shapes and dtypes that do not match the configuration.
    """
    wanted = named_leaves(pure.abstract_parameters(config.model))
    expected = {
        dotted: dtype_and_shape(part)
        for name, leaf in wanted.items()
        for dotted, part in _parts(name, leaf)
    }
    found = {name: dtype_and_shape(array) for name, array in arrays.items()}
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


def write_weights(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> None:
    """Write a safetensors file and compare it with `arrays`; raise OSError if that fails."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        path.touch()
        mode = path.stat().st_mode  # follows the umask; the library would use 0600
        # The library writes an array's memory as it lies, whatever its order.
        whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        save_file(whole, path, metadata={METADATA: json.dumps(metadata)})
        path.chmod(mode)
    except SafetensorError as error:  # it wraps an error of the operating system
        raise OSError(str(error)) from error
    written, _ = read_weights(path)
    wrong = [n for n in arrays if arrays[n].tobytes() != written[n].tobytes()]
    if wrong:
        raise OSError(f"{EXPORTED} holds other values than were written: {wrong[0]}")


def read_weights(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read an exported safetensors file: (arrays by name, metadata).

    Raises UserError if `cem export` did not write it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {}).get(METADATA, "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: was not written by `cem export`: no metadata {METADATA!r}")
    return arrays, metadata


def _step(metadata: Mapping[str, Any], where: str) -> int:
    step = metadata.get("step", 0)
    if type(step) is not int or not 0 <= step <= _LAST_STEP:
        raise UserError(
            f"{where}: its step must be a whole number from 0 to {_LAST_STEP:,}, not "
            f"{json.dumps(step)}"
        )
    return step


def _require_finite(arrays: Mapping[str, np.ndarray], where: str) -> None:
    """Refuse non-finite parameters, which no checkpoint holds (docs/checkpoints.md)."""
    bad = {name: np.count_nonzero(~np.isfinite(array)) for name, array in arrays.items()}
    found = [f"{name}: {count:,} of {arrays[name].size:,}" for name, count in bad.items() if count]
    if found:
        raise UserError(f"{where}: parameters that are not finite:", *_first(found))


def _first(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"… and {more} more"] if more > 0 else [])]


def _parts(name: str, leaf: jax.ShapeDtypeStruct) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """Return (name, shape and dtype) of the file's arrays that make up the parameter `name`."""
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
        damage = find_damage(source)
        if damage is not None:
            raise UserError(f"--input {source} is damaged: {damage}")


@contextlib.contextmanager
def made_whole(output: Path) -> Iterator[Path]:
    """Yield a directory to fill, which becomes `output` unless an exception is raised.

    An existing directory is filled, not replaced: it may be a mount or a shell's directory.
    Raises UserError if it cannot be written.
    """
    output = Path(os.path.abspath(output))
    there = output.is_dir()
    partial = output / _PARTIAL if there else output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if there:
            for entry in sorted(partial.iterdir()):
                entry.rename(output / entry.name)
        else:
            partial.rename(output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)

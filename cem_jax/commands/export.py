"""`cem export`: a run's parameters as safetensors, with configuration and tokenizer beside them.

    model.safetensors    each parameter under its dotted name, a layer at a time (docs/export.md)
    config.json          the run's configuration, as in its directory
    tokenizer.model      SentencePiece
    checksums.sha256     of these files, for `sha256sum -c`

Step, tokenizer hash and separator stand in the safetensors file's own metadata, as JSON under
`cem_jax`. The same checkpoint gives the same bytes.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.directory import EXPORTED, read_config, write_run_files
from cem_jax.runs.integrity import write_checksums
from cem_jax.runs.run import Run
from cem_jax.runs.tree_names import named_leaves

METADATA = "cem_jax"  # one key: the library writes several in any order
_PARTIAL = ".cem.partial"  # the working directory within one that is there


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write a checkpoint of `args.workdir` into the new directory `args.output`.

    Returns {files, parameters, step}. Raises UserError for a run or checkpoint that does not exist
    and for an output that holds something already.
    """
    output = new_directory("--output", args.output)
    run = Run.open(args.workdir)
    parameters, step = run.parameters(args.step)
    tokenizer = run.tokenizer()
    metadata = {
        "step": step,
        "tokenizer_hash": tokenizer.hash,
        "separator": run.config.data.separator,
    }
    with made_whole(output) as partial:
        write_run_files(epath.Path(partial), read_config(run.workdir), tokenizer.model_bytes)
        _write_weights(partial / EXPORTED, layer_by_layer(parameters), metadata)
        write_checksums(epath.Path(partial))
    files = sorted(path.name for path in output.iterdir())
    count = pure.count(run.config.model)
    size = sum((output / name).stat().st_size for name in files)
    print(
        f"{output}: checkpoint {step}, {count:,} parameters, {size / 1e6:.1f} MB in "
        f"{', '.join(files)}",
        file=sys.stderr if args.json else sys.stdout,
    )
    return {"files": [str(output / name) for name in files], "parameters": count, "step": step}


def layer_by_layer(parameters: pure.Parameters) -> dict[str, np.ndarray]:
    """The parameters by dotted name; what is stacked over layers, taken apart.

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


def new_directory(flag: str, path: str | os.PathLike[str]) -> Path:
    """A path for a directory that is yet to be made or filled. Raises UserError for any other."""
    found = Path(path)
    try:
        free = not found.exists() or (found.is_dir() and not _others(found))
    except OSError as error:
        raise UserError(f"{flag} {found}: cannot be used: {error.strerror}") from None
    if not free:
        raise UserError(f"{flag} {found}: exists and is not an empty directory; name a new one")
    return found


def _others(directory: Path) -> list[str]:
    """What a directory holds beside the leftovers of an export that was killed."""
    return [entry.name for entry in directory.iterdir() if entry.name != _PARTIAL]


@contextlib.contextmanager
def made_whole(output: Path) -> Iterator[Path]:
    """A directory to be filled, which becomes `output` at the end; after an exception, nothing.

    A directory that is there already stays the same one: it may be a mount or where a shell is.
    Raises UserError when it cannot be written.
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


def _write_weights(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(dict(arrays), path, metadata={METADATA: json.dumps(metadata)})
    except SafetensorError as error:  # it wraps what the operating system says
        raise OSError(str(error)) from error

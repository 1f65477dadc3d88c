"""What a run writes beside its checkpoints, and whether a directory's run is this one.

config.json        the resolved configuration, all fields
tokenizer.model    the dataset's tokenizer
metrics.jsonl, tensorboard/, checkpoints/
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cem_jax.config import Config, differences, leaves
from cem_jax.errors import UserError
from cem_jax.parallel import distributed

# Fields that may differ when a run goes on: they change neither the model nor the data it sees.
FREE_SECTIONS = ("log", "checkpoint", "eval", "mesh")
FREE_FIELDS = (
    "data.path",  # the dataset may have moved; its fingerprint must be the same
    "data.prefetch",
    "model.scan_layers",
    "model.remat",
    "model.attention.update",
    "model.attention.implementation",
    "model.attention.block_sizes",
    "model.attention.remat_steps",
    "model.mlp.update",
    "model.mlp.remat_steps",
    "train.microbatch",
    "train.max_bad_steps",
    "train.stall_minutes",
)

# Places, which may differ between the machines of a run.
LOCAL_FIELDS = ("data.path", "data.mixture", "log.compile_cache")
_PACKAGE = Path(__file__).resolve().parents[1]


def read_config(workdir: Path) -> Config | None:
    """The configuration of the run in `workdir`, None if there is none; UserError if broken."""
    path = workdir / "config.json"
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(
            f"{path}: not JSON ({error}); restore it or use another --workdir"
        ) from None
    try:
        return Config.from_dict(values)
    except UserError as error:
        raise UserError(*(f"{path}: {message}" for message in error.messages)) from None


def with_absolute_paths(config: Config) -> Config:
    """The data's places, so that they are found from another working directory too."""
    absolute = lambda path: path if "://" in path or not path else os.path.abspath(path)
    # entries are PATH=WEIGHT; a relative path and an absolute one both stand before the last "="
    mixture = tuple(absolute(entry) for entry in config.data.mixture)
    data = replace(config.data, path=absolute(config.data.path), mixture=mixture)
    return replace(config, data=data)


def check_same_run(workdir: Path, config: Config) -> None:
    """Raises UserError, naming every differing field, when `workdir` holds another run."""
    present = read_config(workdir)
    if present is None:
        unfit = [p.name for p in (workdir / "checkpoints",) if p.exists()]
        if unfit:
            raise UserError(f"{workdir}: has {unfit[0]}/ but no config.json; use another --workdir")
        return
    changed = [d for d in differences(present, config) if not is_free(d.partition(":")[0])]
    if changed:
        raise UserError(
            f"{workdir}: belongs to a run of another configuration; use another --workdir, or "
            "undo these changes (there -> now)",
            *changed,
        )


def is_free(field: str) -> bool:
    """Whether the dotted field may differ when a run goes on."""
    return field.partition(".")[0] in FREE_SECTIONS or field in FREE_FIELDS


@contextlib.contextmanager
def only_writer(workdir: Path) -> Iterator[None]:
    """Makes `workdir`, and keeps a second `cem train` out of it.

    Raises UserError when it cannot be made or another process is at work in it.
    """
    if not distributed.is_first():
        yield
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        directory = os.open(workdir, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--workdir {workdir}: cannot be made: {error.strerror}") from None
    try:
        _lock(directory, workdir)
        yield
    finally:
        os.close(directory)


def _lock(directory: int, workdir: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however
    except BlockingIOError:
        raise UserError(
            f"--workdir {workdir}: another `cem train` is at work there; wait, or use another"
        ) from None
    except OSError:
        pass  # a file system without locks


def agreed_facts(config: Config, fingerprint: str, latest: int | None) -> dict[str, Any]:
    """What must be the same in all processes of a run: configuration, code, data, first step."""
    facts = {f"config {name}": value for name, value in leaves(config).items()}
    for name in LOCAL_FIELDS:
        del facts[f"config {name}"]
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes())
    versions = {f"version of {name}": version(name) for name in ("cem_jax", "jax", "jaxlib")}
    return {
        **facts,
        **versions,
        "source code of cem_jax": digest.hexdigest()[:16],
        "dataset": fingerprint,
        "newest checkpoint": latest,
    }


def write_run_files(workdir: Path, config: Config, tokenizer_model: bytes) -> None:
    """config.json and tokenizer.model, each whole or not at all."""
    workdir.mkdir(parents=True, exist_ok=True)
    _write(workdir / "tokenizer.model", tokenizer_model)
    _write(workdir / "config.json", json.dumps(config.to_dict(), indent=2).encode() + b"\n")


def _write(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

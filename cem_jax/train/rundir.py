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
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from etils import epath

from cem_jax.config import Config, leaves
from cem_jax.data.remote import is_url
from cem_jax.errors import UserError
from cem_jax.parallel import distributed
from cem_jax.train.places import write_whole

# Places, which may differ between the machines of a run.
LOCAL_FIELDS = ("data.path", "data.mixture", "log.compile_cache")
_PACKAGE = Path(__file__).resolve().parents[1]


def read_config(workdir: epath.Path) -> Config | None:
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
    absolute = lambda path: path if is_url(path) or not path else os.path.abspath(path)
    # entries are PATH=WEIGHT; a relative path and an absolute one both stand before the last "="
    mixture = tuple(absolute(entry) for entry in config.data.mixture)
    data = replace(config.data, path=absolute(config.data.path), mixture=mixture)
    return replace(config, data=data)


@contextlib.contextmanager
def only_writer(workdir: epath.Path) -> Iterator[None]:
    """Makes `workdir`, and keeps a second `cem train` out of it; object stores have no locks.

    Raises UserError when it cannot be made or another process is at work in it.
    """
    if not distributed.is_first() or is_url(workdir):
        yield
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        directory = os.open(workdir, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--workdir {workdir}: cannot be made: {error.strerror}") from None
    try:
        _lock(directory, workdir)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it holds something
                os.rmdir(workdir)
    finally:
        os.close(directory)


def _lock(directory: int, workdir: epath.Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however
    except BlockingIOError:
        raise UserError(
            f"--workdir {workdir}: another `cem train` is at work there; wait, or use another"
        ) from None
    except OSError:
        pass  # a file system without locks


def agreed_facts(config: Config, fingerprint: str, latest: int | None, origin: str | None):
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
        "--init-from": origin,
    }


def write_run_files(workdir: epath.Path, config: Config, tokenizer_model: bytes) -> None:
    """config.json and tokenizer.model, each whole or not at all."""
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(workdir / "tokenizer.model", tokenizer_model)
    write_whole(workdir / "config.json", json.dumps(config.to_dict(), indent=2).encode() + b"\n")

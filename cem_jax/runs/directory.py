"""The files of a run's directory beside its checkpoints, and checks before training in it.

config.json        the resolved configuration, all fields
tokenizer.model    the dataset's tokenizer
metrics.jsonl, tensorboard/, checkpoints/
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from cem_jax.config import Config, leaves
from cem_jax.distributed import session
from cem_jax.errors import UserError
from cem_jax.runs.integrity import LIST_NAME
from cem_jax.runs.metrics import FILE_NAME, metrics_so_far
from cem_jax.storage.durable import clear_scratch, lock, write_durably
from cem_jax.storage.paths import AnyPath, is_url, writing

EXPORTED = "model.safetensors"  # marks an export; runs have none
# Paths, which may differ between the machines of a run.
LOCAL_FIELDS = ("data.path", "data.mixture", "log.compile_cache")
_PACKAGE = Path(__file__).resolve().parents[1]


def read_config(workdir: AnyPath) -> Config | None:
    """Read the configuration of the run in `workdir`, or None. Raises UserError if it is broken."""
    path = workdir / "config.json"
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not JSON ({error}); restore it or use another --workdir"
        ) from None
    try:
        return Config.from_dict(values)
    except UserError as error:
        raise UserError(*(f"{path}: {message}" for message in error.messages)) from None


def present_config(workdir: AnyPath) -> Config | None:
    """Read the configuration; also raise UserError if checkpoints/ is a file or is without it."""
    folder = workdir / "checkpoints"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file, where a run has a directory; use another --workdir")
    config = read_config(workdir)
    if config is None and folder.exists() and _may_hold_checkpoints(folder):
        raise UserError(
            f"{workdir}: has checkpoints/ but no config.json; put it back (each checkpoint's "
            "info/metadata holds its fields, under extra), or use another --workdir"
        )
    return config


def _may_hold_checkpoints(folder: AnyPath) -> bool:
    """Return whether a directory in `folder` is named as a checkpoint is, by a step."""
    return any(entry.name[:1].isdecimal() and entry.is_dir() for entry in folder.iterdir())


def with_absolute_paths(config: Config) -> Config:
    """Make the data's paths absolute, so that they are found from any working directory."""

    def absolute(path: str) -> str:
        return path if is_url(path) or not path else os.path.abspath(os.path.expanduser(path))

    # entries are PATH=WEIGHT, which can be made absolute like a path
    mixture = tuple(absolute(entry) for entry in config.data.mixture)
    data = replace(config.data, path=absolute(config.data.path), mixture=mixture)
    return replace(config, data=data)


@contextlib.contextmanager
def only_writer(workdir: AnyPath) -> Iterator[None]:
    """Create `workdir` and keep other `cem train` processes out of it (URLs have no locks).

    Directories created here are removed if they are still empty at the end.

    Raises UserError if `workdir` cannot be created or another process is using it.
    """
    if not session.current().is_first or is_url(workdir):
        yield
        return
    made = list(itertools.takewhile(lambda p: not p.exists(), (workdir, *workdir.parents)))
    busy = f"--workdir {workdir}: another `cem train` is at work there; wait, or use another"
    with contextlib.ExitStack() as held:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock(workdir, busy))
        except OSError as error:
            _unmake(made)
            taken = isinstance(error, FileExistsError)
            why = "there is a file or a broken link of that name" if taken else error.strerror
            raise UserError(f"--workdir {workdir}: cannot be made: {why}") from None
        held.callback(_unmake, made)
        yield


def _unmake(folders: list[AnyPath]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # not empty, or not created
            os.rmdir(folder)


def agreed_facts(config: Config, fingerprint: str, latest: int | None, origin: str | None):
    """Return what all processes of a run must agree on: configuration, code, data, first step."""
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


def require_nothing_lost(workdir: AnyPath, once_complete: list[str], before: Config) -> None:
    """Raise UserError if a run without a checkpoint to resume from has had one.

    Args:
      once_complete: directories that are no longer complete checkpoints.
      before: the configuration the run was last started with.
    """
    folder, path = workdir / "checkpoints", workdir / FILE_NAME
    again = "use another --workdir, or remove checkpoints/ and metrics.jsonl to begin again"
    if once_complete:
        raise UserError(
            f"{folder}: no checkpoint to resume from; these were complete once, and have no "
            f"{LIST_NAME} now: {', '.join(once_complete)}; put it back, {again}"
        )
    last = max((line["step"] for line in metrics_so_far(workdir)), default=0)
    c = before.checkpoint
    # A save waits for the previous one to finish, so by then at least one was complete.
    if last > 2 * min(c.every, c.keep_every or c.every):
        raise UserError(
            f"{folder}: no checkpoint to resume from, but {path} reaches step {last}; put the "
            f"checkpoints back, {again}"
        )


def write_run_files(workdir: AnyPath, config: Config, tokenizer_model: bytes) -> None:
    """Write config.json and tokenizer.model, each whole or not at all."""
    workdir.mkdir(parents=True, exist_ok=True)
    tokenizer, fields = workdir / "tokenizer.model", workdir / "config.json"
    clear_scratch(tokenizer, fields, workdir / FILE_NAME)
    with writing(tokenizer):
        write_durably(tokenizer, tokenizer_model)
    with writing(fields):
        write_durably(fields, json.dumps(config.to_dict(), indent=2).encode() + b"\n")

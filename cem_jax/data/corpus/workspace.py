"""Where a dataset is made: a directory beside its final place, with a journal to go on from.

    <output>.partial/.lock          held while a process is at work
    <output>.partial/journal.json   what was done when everything was last brought to the disk

The directory has no dataset.json before it is complete, and is then renamed: an unfinished
dataset cannot be opened, and a finished one appears at once.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cem_jax.data.dataset.store import DESCRIPTION, MODEL
from cem_jax.errors import UserError
from cem_jax.storage.durable import sync_directory, write_durably

PARTIAL = ".partial"  # the end of its name
LOCK = ".lock"
_JOURNAL = "journal.json"
_OWN = (LOCK, _JOURNAL)


class Workplace:
    """A directory to fill; see `workplace`."""

    def __init__(self, path: Path, command: dict[str, Any], output: Path):
        self.path = path
        self._command = command
        self._kept = self._read(output)
        if self._kept is None:
            self._clear()

    @property
    def state(self) -> dict[str, Any] | None:
        """What the last `keep` was given, by an earlier process with the same command."""
        return None if self._kept is None else self._kept["state"]

    def keep(self, state: dict[str, Any]) -> None:
        """Record what a later process can go on from; `state` must be on the disk already."""
        kept = {"command": self._command, "state": state}
        write_durably(self.path / _JOURNAL, json.dumps(kept).encode())
        self._kept = kept

    def is_resumable(self) -> bool:
        return self._kept is not None

    def start_over(self) -> None:
        """Forget everything that was done."""
        self._kept = None
        self._clear()

    def finish(self, output: Path) -> None:
        """Give the directory its final name."""
        self.path.rename(output)
        sync_directory(output.parent)
        for name in (_JOURNAL, LOCK):  # till then the lock keeps others away
            (output / name).unlink(missing_ok=True)

    def _read(self, output: Path) -> dict[str, Any] | None:
        try:
            kept = json.loads((self.path / _JOURNAL).read_text())
            then, now = kept["command"], self._command
            kept["state"]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # killed before anything was kept
        changed = changes(then, now)
        if changed:
            raise UserError(
                f"{self.path} holds what an interrupted `cem prepare` for {output} did; repeat its "
                "command to go on, or remove that directory. What differs:",
                *changed,
            )
        return kept

    def _clear(self) -> None:
        (self.path / _JOURNAL).unlink(missing_ok=True)  # first: it describes the others
        for left in self.path.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left.name not in _OWN:
                left.unlink()


@contextlib.contextmanager
def workplace(output: Path, command: dict[str, Any]) -> Iterator[Workplace]:
    """A directory to fill that is renamed to `output` at the end.

    `command` says what is made: a directory that a killed process left is continued if it was
    making the same, and cleared if it kept nothing. After an exception the directory is removed,
    unless there is something to go on from. Raises UserError when `output` exists and is not
    empty, when another process is writing it, when another command left off there, when what has
    the working directory's name is not ours, or when it cannot be written.
    """
    require_free(output)
    output = Path(os.path.abspath(output))
    partial = output.with_name(output.name + PARTIAL)
    for path in sorted(partial.rglob("*")):
        if not path.is_dir() and not _is_own(path.relative_to(partial)):
            raise UserError(
                f"{partial} is needed to work in; {path} is not of `cem prepare`: move it"
            )
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = (partial / LOCK).open("w")
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is writing {output}") from None
        work = Workplace(partial, command, output)
        try:
            yield work
            work.finish(output)
        except BaseException as error:
            if not work.is_resumable():
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno is not None:
                raise UserError(f"--output {output}: {error.strerror}") from error
            raise


def _is_own(inside: Path) -> bool:
    """Whether a file at this place of a working directory is of our making."""
    if len(inside.parts) == 1:
        return inside.name.removesuffix(".tmp") in (LOCK, _JOURNAL, DESCRIPTION, MODEL)
    return len(inside.parts) == 2 and inside.suffix == ".npy"


def require_free(output: Path) -> None:
    """Raise UserError unless `output` is absent or an empty directory that can be replaced."""
    if output.is_symlink():
        raise UserError(f"--output {output} is a link: name the directory itself")
    if os.path.ismount(output):
        raise UserError(f"--output {output} is a mount point: name a directory within it")
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"--output {output} exists and is not empty: name a new directory")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file: name a directory")


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`name: value there, value now` for everything that two commands differ in."""
    return [
        f"{name}: {then.get(name)!r} there, {now[name]!r} now"
        for name in now
        if then.get(name) != now[name]
    ]

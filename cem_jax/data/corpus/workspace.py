"""The output directory of `cem prepare`: built beside its final place, and recognized later.

    <output>.partial/.lock          held while a process is at work
    <output>.partial/journal.json   the state when everything was last flushed to disk
    <output>/dataset.json           among other things, the command that made it

The working directory has no dataset.json until it is complete, and is then renamed: an unfinished
dataset cannot be opened, and a finished one appears at once. A command is stored as {flag: value}
for all that the tokens depend on, with a digest of the input files' paths, sizes and times.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cem_jax.data.dataset.store import DESCRIPTION, MODEL, open_dataset, read_description
from cem_jax.errors import UserError
from cem_jax.storage.durable import lock, new_directory, sync, write_durably, written_as
from cem_jax.storage.paths import any_path

INPUT_FILES = "input files"  # a key of a command
PARTIAL = ".partial"  # ends a working directory's name
LOCK = ".lock"
_JOURNAL = "journal.json"


class Workspace:
    """A directory to fill; see `workspace`."""

    def __init__(self, path: Path, command: dict[str, Any], output: Path):
        self.path = path
        self._command = command
        self.state = self._read(output)  # what `keep` recorded last, in any process
        if self.state is None:
            self._clear()

    def keep(self, state: dict[str, Any]) -> None:
        """Record the state to continue from; the data it describes must be on disk already."""
        kept = {"command": self._command, "state": state}
        write_durably(self.path / _JOURNAL, json.dumps(kept).encode())
        self.state = state

    def start_over(self) -> None:
        """Discard everything done so far."""
        self.state = None
        self._clear()

    def finish(self, output: Path) -> None:
        """Rename the directory to `output`."""
        self.path.rename(output)
        sync(output.parent)
        for name in (_JOURNAL, LOCK):  # until now the lock kept others away
            (output / name).unlink(missing_ok=True)

    def _read(self, output: Path) -> dict[str, Any] | None:
        try:
            kept = json.loads((self.path / _JOURNAL).read_text())
            then, state = kept["command"], kept["state"]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # killed before anything was recorded
        changed = _changes(then, self._command)
        if changed:
            raise UserError(
                f"{self.path} holds the work of an interrupted `cem prepare` for {output}; rerun "
                "its command to continue, or remove that directory. What differs:",
                *changed,
            )
        return state

    def _clear(self) -> None:
        (self.path / _JOURNAL).unlink(missing_ok=True)  # first: it describes the other files
        for left in self.path.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left.name != LOCK:
                left.unlink()


@contextlib.contextmanager
def workspace(output: Path, command: dict[str, Any]) -> Iterator[Workspace]:
    """Open a directory to fill that is renamed to `output` at the end.

    A directory that a killed process left is continued if its `command` was the same, and cleared
    if it recorded nothing. After an exception the directory is removed, unless there is something
    to continue from.

    Raises:
      UserError: `output` exists and is not empty, another process is writing it, another command
        was interrupted there, the working directory holds foreign files, or it cannot be written.
    """
    require_free(output)
    output = Path(os.path.abspath(output))
    partial = output.with_name(output.name + PARTIAL)
    for path in sorted(partial.rglob("*")):
        if not path.is_dir() and not _is_own(path.relative_to(partial)):
            raise UserError(
                f"{path} is in the working directory, but not from `cem prepare`: move it away"
            )
    with contextlib.ExitStack() as held:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock(partial / LOCK, f"another process is writing {output}"))
        except OSError as error:
            raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
        work = Workspace(partial, command, output)
        try:
            yield work
            work.finish(output)
        except BaseException as error:
            if work.state is None:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno is not None:
                raise UserError(f"--output {output}: {error.strerror}") from error
            raise


def require_free(output: Path) -> None:
    """Raise UserError unless `output` is absent or an empty directory that can be replaced."""
    if output.is_symlink():
        raise UserError(f"--output {output} is a link: name the directory itself")
    if os.path.ismount(output):
        raise UserError(f"--output {output} is a mount point: name a directory within it")
    new_directory("--output", output)


def was_made(output: str | os.PathLike[str]) -> bool:
    """Return whether `output` is a complete dataset that says which command made it.

    Datasets of versions that recorded no command count as any other directory that is not empty.
    """
    output = any_path(output)
    if output.is_symlink() or not os.path.isfile(output / DESCRIPTION):
        return False
    try:
        return isinstance(read_description(output).get("command"), dict)
    except (UserError, AttributeError):  # another program's, or damaged
        return False


def require_made_by(output: Path, command: dict[str, Any], skip_bad_files: bool) -> dict[str, Any]:
    """Return the description of the complete dataset `output` if this same command made it.

    Raises:
      UserError: the command differs, or the files are faulty; their contents are not read.
    """
    try:
        open_dataset(output)
    except UserError as error:
        advice = f"--output {output} is a damaged dataset: remove it, or name a new directory"
        raise UserError(*error.messages, advice) from None
    description = read_description(output)
    then = description["command"]
    changed = _changes(then, command)
    if description["bad_files"] and not skip_bad_files:
        changed.append(f"--skip-bad-files: {description['bad_files']} skipped there, not given now")
    if not changed:
        return description
    if then != command == then | {INPUT_FILES: command[INPUT_FILES]}:
        why = "the input files have changed since it was made from them"
    else:
        why = "another command made it"
    raise UserError(
        f"--output {output} is a complete dataset, and {why}: name a new directory, or remove "
        "this one. What differs:",
        *changed,
    )


def _is_own(inside: Path) -> bool:
    """Return whether a file at this place in a working directory is from `cem prepare`."""
    if len(inside.parts) == 1:
        return written_as(inside.name) in (LOCK, _JOURNAL, DESCRIPTION, MODEL)
    return len(inside.parts) == 2 and inside.suffix == ".npy"


def _changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List `name: value there, value now` for every difference between two commands."""
    return [
        f"{name}: {then.get(name)!r} there, {now[name]!r} now"
        for name in now
        if then.get(name) != now[name]
    ]

"""Checksums of a directory's files, so that damage is found before anything reads them.

Orbax finds a truncated or missing file, but not flipped bytes: arrays that do not compress are
stored raw and restored wrong without a word. So each checkpoint carries a list of its files'
SHA-256 sums in the format of `sha256sum`; `sha256sum -c checksums.sha256` inside a checkpoint
checks it by hand. The list is written last, so a directory that has one was written whole.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from etils import epath

LIST_NAME = "checksums.sha256"
# Orbax's markers: it rewrites them after the list is made, and needs none of them to restore.
_UNLISTED = {LIST_NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}
_THREADS = 4  # hashing and reading release the GIL


@dataclass(frozen=True)
class Damage:
    """What is wrong with a directory, in words; `lasting` unless another try may find it well."""

    what: str
    lasting: bool = True

    def __str__(self) -> str:
        return self.what


def write_checksums(directory: epath.Path) -> None:
    """Write the list of every file below `directory` into it, once they are all on the disk."""
    names = sorted(_files(directory, ""))
    sums = _digests(directory, names)
    for told in sums.values():
        if isinstance(told, Damage):
            raise OSError(f"{directory}: {told}")
    lines = "".join(f"{sums[name]}  {name}\n" for name in names)
    (directory / LIST_NAME).write_text(lines)
    if "://" not in str(directory):  # object stores keep what they have taken
        for name in (*names, LIST_NAME):
            _flush(directory / name)


def is_whole(directory: epath.Path) -> bool:
    """Whether `directory` was written to its end (it may have been damaged since)."""
    return (directory / LIST_NAME).exists()


def find_damage(directory: epath.Path, only: str | None = None) -> Damage | None:
    """The first file below `directory` that is missing, altered or not to be read; None: all well.

    `only`: check this one file of the list instead of all.
    """
    try:
        lines = (directory / LIST_NAME).read_text().splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except ValueError:
        return Damage(f"{LIST_NAME} has been altered or cut short")
    except Exception as error:
        return _unread(LIST_NAME, error)
    if not expected or (only is not None and only not in expected):
        return Damage(f"{LIST_NAME} is incomplete")
    names = [only] if only is not None else list(expected)
    found = _digests(directory, names)
    for name in names:
        if isinstance(found[name], Damage):
            return found[name]
        if found[name] != expected[name]:
            return Damage(f"{name} has been altered or cut short")
    return None


def _unread(name: str, error: Exception) -> Damage:
    """A store's driver raises what it likes: all but a missing file may be there the next time."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Damage(f"{name} is missing")
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return Damage(f"{name} cannot be read: {reason.splitlines()[0]}", lasting=False)


def _flush(path: epath.Path) -> None:
    """Until a power cut does not lose it: what is older may be removed after that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(directory: epath.Path, prefix: str) -> Iterator[str]:
    for path in directory.iterdir():
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        elif path.name not in _UNLISTED:
            yield prefix + path.name


def _digests(directory: epath.Path, names: Sequence[str]) -> dict[str, str | Damage]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(directory, name), names), strict=True))


def _digest(directory: epath.Path, name: str) -> str | Damage:
    digest = hashlib.sha256()
    try:
        with (directory / name).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except Exception as error:
        return _unread(name, error)
    return digest.hexdigest()

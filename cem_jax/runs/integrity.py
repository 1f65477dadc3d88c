"""Checksums of a directory's files, so that damage is found before anything reads them.

Orbax finds a truncated or missing file, but not flipped bytes: arrays that do not compress are
stored raw, and corruption is restored silently. So each checkpoint has a list of its files'
SHA-256 sums in the format of `sha256sum`; `sha256sum -c checksums.sha256` inside a checkpoint
checks it by hand. The list is written last, so a directory that has one is complete.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cem_jax.storage.durable import sha256_of, sync
from cem_jax.storage.paths import AnyPath, files_below, is_url

LIST_NAME = "checksums.sha256"
# Orbax's markers, which it rewrites after the list is made and does not need to restore.
_UNLISTED = {LIST_NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}
_THREADS = 4  # hashing and reading release the GIL


@dataclass(frozen=True)
class Damage:
    """A description of what is wrong with a directory; `lasting` unless it may pass."""

    what: str
    lasting: bool = True

    def __str__(self) -> str:
        return self.what


def write_checksums(directory: AnyPath) -> None:
    """Write the checksum list of `directory`, and flush the list and all files to the disk."""
    names = sorted(n for n in files_below(directory) if n.rpartition("/")[2] not in _UNLISTED)
    sums = _digests(directory, names)
    for digest in sums.values():
        if isinstance(digest, Damage):
            raise OSError(f"{directory}: {digest}")
    lines = "".join(f"{sums[name]}  {name}\n" for name in names)
    (directory / LIST_NAME).write_text(lines)
    if not is_url(directory):  # object stores are durable
        for name in (*names, LIST_NAME):
            sync(directory / name)  # afterwards, older checkpoints may be removed


def is_whole(directory: AnyPath) -> bool:
    """Return whether `directory` was written completely (it may have been damaged since)."""
    return (directory / LIST_NAME).exists()


def find_damage(directory: AnyPath, only: str | None = None) -> Damage | None:
    """Return the damage of the first file that is missing, altered or unreadable, or None.

    `only`: check just this file of the list.
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
    """Return the damage for `error`; anything but a missing file may be readable the next time."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Damage(f"{name} is missing")
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return Damage(f"{name} cannot be read: {reason.splitlines()[0]}", lasting=False)


def _digests(directory: AnyPath, names: Sequence[str]) -> dict[str, str | Damage]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(directory, name), names), strict=True))


def _digest(directory: AnyPath, name: str) -> str | Damage:
    try:
        return sha256_of(directory / name)
    except Exception as error:
        return _unread(name, error)

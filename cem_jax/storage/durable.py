"""Files that are whole or absent even if the machine stops; locks, checksums, new directories."""

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from cem_jax.errors import UserError
from cem_jax.storage.paths import AnyPath, any_path, is_url

_SCRATCH = re.compile(r"\.(.+)\.[0-9]+")


def write_durably(path: AnyPath, content: bytes | Iterable[bytes]) -> None:
    """Write a file whole or not at all, even if the machine stops.

    Several processes may write the same file at once: one of them wins. Raises OSError, or what
    a store's driver raises (see `paths.writing`).
    """
    pieces = [content] if isinstance(content, bytes) else content
    if is_url(path):  # an object appears when it is complete
        path.write_bytes(b"".join(pieces))
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(OSError):  # already renamed, or the disk fails
            os.unlink(scratch)
    sync(path.parent)


def written_as(name: str) -> str:
    """Return the file name that a killed `write_durably` was writing as the scratch file `name`.

    Other names are returned unchanged.
    """
    match = _SCRATCH.fullmatch(name)
    return match[1] if match else name


def clear_scratch(*paths: AnyPath) -> None:
    """Remove scratch files of killed writes to `paths`; no other process may be writing them."""
    for path in paths:
        if not is_url(path):
            for scratch in path.parent.glob(f".{path.name}.*"):
                if written_as(scratch.name) == path.name:
                    scratch.unlink()


def sync(path: Path) -> None:
    """Flush a local file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: AnyPath) -> str:
    """Return the hex digest of a whole file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: Path, busy: str | None = None) -> Iterator[None]:
    """Hold a lock on a local directory, or on a file, which is created if missing.

    The lock ends with the process, however that ends. It is skipped where the file system has none.

    Args:
      busy: the message of the UserError when another process holds it; None: wait for it.

    Raises OSError when the file cannot be created.
    """
    is_directory = path.is_dir()
    descriptor = os.open(path, os.O_RDONLY if is_directory else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(busy) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def new_directory(flag: str, path: str | os.PathLike[str], *, but_for: str | None = None) -> Path:
    """Return the path of a directory, checked to be missing or empty.

    `but_for`: the name of an entry that it may contain. Raises UserError, naming `flag`.
    """
    found = any_path(path)
    try:
        entries = list(found.iterdir()) if found.is_dir() else []
        is_file = found.exists() and not found.is_dir()
    except OSError as error:
        raise UserError(f"{flag} {found}: cannot be used: {error.strerror}") from None
    if is_file:
        raise UserError(f"{flag} {found} is a file: name a directory")
    if any(entry.name != but_for for entry in entries):
        raise UserError(f"{flag} {found} exists and is not empty: name a new directory")
    return found

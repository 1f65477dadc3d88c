"""Local files that are whole or absent, even if the machine stops; and their checksums."""

import hashlib
import os
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a whole file or none of it, even if the machine stops. Raises OSError."""
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring a directory's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return `sha256:` and the hex digest of a whole file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()

"""Writing a dataset directory: token shards, and the rename that makes it appear whole."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Integer

from cem_jax.errors import UserError

SHARD_TOKENS = 1 << 27
_LOCK = ".lock"


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 while every id fits, uint32 beyond 65,536 pieces."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def sha256_of(path: Path) -> str:
    """`sha256:` and the hex digest of a whole file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


class ShardWriter:
    """Appends token ids to `<root>/<split>/tokens-00000.npy`, …, each of at most `shard_tokens`."""

    def __init__(self, root: Path, split: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS):
        self._root, self._split, self._dtype = root, split, dtype
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._path = root
        self._written = 0
        self._shards: list[dict] = []

    def append(self, ids: Integer[np.ndarray, " tokens"]) -> None:
        """Write ids; a document may go on in the next shard."""
        ids = ids.astype(self._dtype, copy=False)
        while ids.size:
            if self._file is None:
                self._open()
            part = ids[: self._shard_tokens - self._written]
            self._file.write(part.data)
            self._written += part.size
            ids = ids[part.size :]
            if self._written == self._shard_tokens:
                self._close_shard()

    def close(self) -> list[dict]:
        """Finish the last shard; the list of {file, tokens, checksum}."""
        if self._file is not None:
            self._close_shard()
        return self._shards

    def abandon(self) -> None:
        """Close the open file, if any, without finishing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        name = f"{self._split}/tokens-{len(self._shards):05d}.npy"
        self._path = self._root / name
        self._path.parent.mkdir(exist_ok=True)
        self._file = self._path.open("w+b")
        self._written = 0
        self._header()

    def _header(self) -> None:
        """NumPy pads headers so that any count fits the same bytes: written again at the end."""
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(
            self._file,
            {"descr": self._dtype.str, "fortran_order": False, "shape": (self._written,)},
        )

    def _close_shard(self) -> None:
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._shards.append(
            {
                "file": str(self._path.relative_to(self._root)),
                "tokens": self._written,
                "checksum": sha256_of(self._path),
            }
        )


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A directory to fill that is renamed to `output` at the end, or removed after an exception.

    It is called `<output>.partial`; what a killed run left there is cleared first. Raises
    UserError when `output` exists and is not empty, when another process is writing it, or
    when it cannot be written.
    """
    require_free(output)
    partial = output.with_name(output.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = (partial / _LOCK).open("w")
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is writing {output}") from None
        try:
            _clear(partial)
            yield partial
            (partial / _LOCK).unlink()
            partial.rename(output)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno is not None:
                raise UserError(f"--output {output}: {error.strerror}") from error
            raise


def require_free(output: Path) -> None:
    """Raise UserError unless `output` is absent or an empty directory."""
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"--output {output} exists and is not empty: name a new directory")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file: name a directory")


def _clear(partial: Path) -> None:
    for left in partial.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name != _LOCK:
            left.unlink()

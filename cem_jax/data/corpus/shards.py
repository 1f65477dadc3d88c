"""Writing token shards, so that a writer that was killed can be continued."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Integer

from cem_jax.storage.durable import sha256_of

SHARD_TOKENS = 1 << 27
_HEADER_BYTES = 128


class Stream(NamedTuple):
    """What token ids are appended to: one source of one split."""

    split: str
    source: str  # "" where sources have no names


class ShardState(NamedTuple):
    """What is safely on disk of a stream."""

    shards: list[dict[str, Any]]  # finished: {file, tokens, checksum}
    written: int  # tokens of the one that is open


NOTHING = ShardState([], 0)


class ShardWriter:
    """Appends token ids to `<root>/<stem>-00000.npy`, …, each of at most `shard_tokens`.

    `state`, of an earlier writer, continues that one: what the file holds beyond is cut off.
    """

    def __init__(
        self,
        root: Path,
        stem: str,
        dtype: np.dtype,
        shard_tokens: int = SHARD_TOKENS,
        state: ShardState = NOTHING,
    ):
        self._root, self._stem, self._dtype = root, stem, dtype
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._shards = list(state.shards)
        self._written = 0
        if state.written:
            self._open(state.written)

    def append(self, ids: Integer[np.ndarray, " tokens"]) -> None:
        """Write ids; a document may go on in the next shard."""
        ids = ids.astype(self._dtype, copy=False)
        while ids.size:
            if self._file is None:
                self._open(0)
            part = ids[: self._shard_tokens - self._written]
            self._file.write(part.data)
            self._written += part.size
            ids = ids[part.size :]
            if self._written == self._shard_tokens:
                self._close_shard()

    def sync(self) -> ShardState:
        """Bring everything to the disk; what to continue from."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return ShardState(list(self._shards), self._written if self._file is not None else 0)

    def close(self) -> list[dict[str, Any]]:
        """Finish the last shard; the list of {file, tokens, checksum}."""
        if self._file is not None:
            self._close_shard()
        return self._shards

    def abandon(self) -> None:
        """Close the open file, if any, without finishing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def files(self) -> list[Path]:
        """Every file there is of the stream."""
        finished = [self._root / shard["file"] for shard in self._shards]
        return [*finished, self._path] if self._file is not None else finished

    @property
    def _path(self) -> Path:
        return self._root / f"{self._stem}-{len(self._shards):05d}.npy"

    def _open(self, written: int) -> None:
        """Raises OSError when the file holds less than was written."""
        end = _HEADER_BYTES + written * self._dtype.itemsize
        if written and self._path.stat().st_size < end:
            raise OSError(f"{self._path} is shorter than it was")
        self._path.parent.mkdir(exist_ok=True)
        self._file = self._path.open("r+b" if written else "w+b")
        self._written = written
        self._header()
        if written:
            self._file.truncate(end)
            self._file.seek(end)

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


class StreamWriters:
    """A ShardWriter for each stream of a dataset, made when the stream's first ids come."""

    def __init__(self, root: Path, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS):
        self._root, self._dtype, self._shard_tokens = root, dtype, shard_tokens
        self._writers: dict[Stream, ShardWriter] = {}

    def append(self, stream: Stream, ids: Integer[np.ndarray, " tokens"]) -> None:
        """Write ids behind those that the stream has."""
        if stream not in self._writers:
            self._open(stream, NOTHING)
        self._writers[stream].append(ids)

    def sync(self) -> list[list[Any]]:
        """Bring everything to the disk; what `restore` takes, as JSON can hold it."""
        return [[*stream, *writer.sync()] for stream, writer in self._writers.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Go on from what `sync` returned; OSError when the files hold less than that."""
        for split, source, shards, written in state:
            for shard in shards:
                path, size = self._root / shard["file"], shard["tokens"] * self._dtype.itemsize
                if path.stat().st_size != _HEADER_BYTES + size:
                    raise OSError(f"{path} is not as long as it was")
            self._open(Stream(split, source), ShardState(shards, written))
        known = {path for writer in self._writers.values() for path in writer.files}
        for path in self._root.glob("*/*.npy"):
            if path not in known:
                path.unlink()  # begun after the state was recorded

    def close(self) -> dict[Stream, list[dict[str, Any]]]:
        """Finish every stream; the shards of each."""
        return {stream: writer.close() for stream, writer in self._writers.items()}

    def abandon(self) -> None:
        """Close all files without finishing them, and forget them."""
        for writer in self._writers.values():
            writer.abandon()
        self._writers.clear()

    def _open(self, stream: Stream, state: ShardState) -> None:
        stem = f"{stream.split}/{_stem(stream.source)}"
        self._writers[stream] = ShardWriter(
            self._root, stem, self._dtype, self._shard_tokens, state
        )


def _stem(source: str) -> str:
    """`tokens`, or `tokens-` and the source's name as a file's name can hold it."""
    if not source:
        return "tokens"
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", source)[:64]
    if plain != source:
        plain += "-" + hashlib.blake2b(source.encode(), digest_size=3).hexdigest()
    return f"tokens-{plain}"

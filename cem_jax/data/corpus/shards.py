"""Write token shards in such a way that a killed writer can be continued."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Integer

from cem_jax.storage.durable import sha256_of

SHARD_TOKENS = 1 << 27
_HEADER_BYTES = 128


class Stream(NamedTuple):
    """A growing sequence of token ids: one source of one split."""

    split: str
    source: str  # "" where sources have no names


class ShardWriter:
    """Appends token ids to `<root>/<stem>-00000.npy`, …, each of at most `shard_tokens`.

    `shards` were finished by an earlier writer, which had recorded `written` tokens of the next
    one; anything beyond them is cut off.
    """

    def __init__(
        self,
        root: Path,
        stem: str,
        dtype: np.dtype,
        shard_tokens: int,
        shards: Sequence[dict[str, Any]] = (),
        written: int = 0,
    ):
        self._root, self._stem, self._dtype = root, stem, dtype
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._shards = list(shards)
        self._written = 0
        if written:
            self._open(written)

    def append(self, ids: Integer[np.ndarray, " tokens"]) -> None:
        """Write ids; a document may continue in the next shard."""
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

    def sync(self) -> tuple[list[dict[str, Any]], int]:
        """Flush everything to disk; return the (shards, written) to continue from."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return list(self._shards), self._written if self._file is not None else 0

    def close(self) -> list[dict[str, Any]]:
        """Finish the last shard; return the list of {file, tokens, checksum}."""
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
        """Every file of the stream."""
        finished = [self._root / shard["file"] for shard in self._shards]
        return [*finished, self._path] if self._file is not None else finished

    @property
    def _path(self) -> Path:
        return self._root / f"{self._stem}-{len(self._shards):05d}.npy"

    def _open(self, written: int) -> None:
        """Open the next shard at `written` tokens; raise OSError if the file holds fewer."""
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
        """Write the header, padded so that it can be rewritten with any count at the end."""
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
                "checksum": "sha256:" + sha256_of(self._path),
            }
        )


class StreamWriters:
    """One ShardWriter per stream of a dataset, made when the stream's first ids arrive."""

    def __init__(self, root: Path, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS):
        self._root, self._dtype, self._shard_tokens = root, dtype, shard_tokens
        self._writers: dict[Stream, ShardWriter] = {}

    def append(self, stream: Stream, ids: Integer[np.ndarray, " tokens"]) -> None:
        """Append ids to a stream."""
        if stream not in self._writers:
            self._writers[stream] = self._writer(stream)
        self._writers[stream].append(ids)

    def sync(self) -> list[list[Any]]:
        """Flush everything to disk; return the state for `restore`, as JSON can hold it."""
        return [[*stream, *writer.sync()] for stream, writer in self._writers.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Continue from what `sync` returned; raise OSError if the files do not match it."""
        for split, source, shards, written in state:
            for shard in shards:
                path, size = self._root / shard["file"], shard["tokens"] * self._dtype.itemsize
                if path.stat().st_size != _HEADER_BYTES + size:
                    raise OSError(f"{path} has another length than it had")
            stream = Stream(split, source)
            self._writers[stream] = self._writer(stream, shards, written)
        known = {path for writer in self._writers.values() for path in writer.files}
        for path in self._root.glob("*/*.npy"):
            if path not in known:
                path.unlink()  # begun after the state was recorded

    def close(self) -> dict[Stream, list[dict[str, Any]]]:
        """Finish every stream; return the shards of each."""
        return {stream: writer.close() for stream, writer in self._writers.items()}

    def abandon(self) -> None:
        """Close all files without finishing them, and forget them."""
        for writer in self._writers.values():
            writer.abandon()
        self._writers.clear()

    def _writer(self, stream: Stream, *state: Any) -> ShardWriter:
        stem = f"{stream.split}/{_stem(stream.source)}"
        return ShardWriter(self._root, stem, self._dtype, self._shard_tokens, *state)


def _stem(source: str) -> str:
    """Return `tokens`, or `tokens-` and the source's name made safe for a file name."""
    if not source:
        return "tokens"
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", source)[:64]
    if plain != source:
        plain += "-" + hashlib.blake2b(source.encode(), digest_size=3).hexdigest()
    return f"tokens-{plain}"

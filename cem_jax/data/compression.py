"""Decompressed streams that notice what the libraries let pass: truncation, wrong content."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

import zstandard

_READ_BYTES = 1 << 16
_LARGEST_WINDOW = 1 << 31  # frames made with `zstd --long`
_GZIP_START = b"\x1f\x8b"
_ZSTD_START = b"\x28\xb5\x2f\xfd"
_PARQUET_START = b"PAR1\x15"
_OTHER_CONTENT = {  # what a file that should be text may really be
    b"version https://git-lfs": "a Git LFS pointer, not the data: run `git lfs pull`",
    _GZIP_START: "gzip data: its name should end in .gz",
    _ZSTD_START: "zstd data: its name should end in .zst",
    _PARQUET_START: "Parquet data: its name should end in .parquet",
    b"PK\x03\x04": "a zip archive: unpack it",
    **{b"BZh%d1AY&SY" % level: "bzip2 data: unpack it" for level in range(1, 10)},
    b"\xfd7zXZ\x00": "xz data: unpack it",
    b"\xff\xfe": "UTF-16 text: convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text: convert it to UTF-8",
}


class BadFile(Exception):
    """A whole file that cannot be read to its end; the message says why, without its name."""


class ByteStream:
    """The decompressed bytes of a .gz, .zst or plain file, in chunks.

    Iterating raises BadFile for truncated or damaged streams, for content that is not what the
    name says, and when the file cannot be read. Concatenated frames are read to the last one.
    """

    def __init__(self, path: Path):
        try:
            self._raw: BinaryIO = path.open("rb")
        except OSError as error:
            raise BadFile(f"cannot be read: {error.strerror}") from None
        self._packing = path.suffix.lower()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def position(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return self._raw.tell() if not self._raw.closed else 0

    def __iter__(self) -> Iterator[bytes]:
        head = self._raw.read(64)
        self._raw.seek(0)
        refuse_other_content(head, allowed=self._packing)
        unpack = {".gz": self._gzip, ".zst": self._zstd}.get(self._packing, self._plain)
        try:
            first = True
            for chunk in unpack():
                if first and self._packing in (".gz", ".zst"):
                    refuse_other_content(chunk[:64])
                first = False
                yield chunk
        except OSError as error:
            raise BadFile(f"cannot be read: {error.strerror or error}") from None

    def _plain(self) -> Iterator[bytes]:
        while chunk := self._raw.read(_READ_BYTES):
            yield chunk

    def _gzip(self) -> Iterator[bytes]:
        if not self._raw.read(1):
            raise BadFile("is empty: not even a gzip header")
        self._raw.seek(0)
        try:
            with gzip.GzipFile(fileobj=self._raw) as unpacked:
                while chunk := unpacked.read1(_READ_BYTES):
                    yield chunk
        except EOFError:
            raise BadFile("is truncated: the gzip stream ends early") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadFile(f"is not intact gzip data: {error}") from None

    def _zstd(self) -> Iterator[bytes]:
        """Frame by frame: the library's own stream reader ends silently on truncated input."""
        unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        frame = None
        frames = 0
        while packed := self._raw.read(_READ_BYTES):
            while packed:
                if frame is None:
                    frame = unpacker.decompressobj()
                    frames += 1
                try:
                    chunk = frame.decompress(packed)
                except zstandard.ZstdError as error:
                    raise BadFile(f"is not intact zstd data: {_cause(error)}") from None
                if chunk:
                    yield chunk
                packed = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
        if frame is not None:
            raise BadFile("is truncated: the zstd stream ends inside a frame")
        if not frames:
            raise BadFile("is empty: not even a zstd frame")


def refuse_other_content(head: bytes, allowed: str = "") -> None:
    """Raise BadFile when the first bytes show content other than text or what `allowed` names."""
    own = {".gz": _GZIP_START, ".zst": _ZSTD_START, ".parquet": _PARQUET_START}.get(allowed)
    for start, content in _OTHER_CONTENT.items():
        if head.startswith(start) and start != own:
            raise BadFile(f"is {content}")


def _cause(error: Exception) -> str:
    return str(error).rsplit("error: ", 1)[-1]

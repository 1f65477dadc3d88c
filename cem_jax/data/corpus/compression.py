"""Decompressed streams that detect truncation, damage, and content that contradicts the name."""

import bz2
import codecs
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

import zstandard

from cem_jax.storage.paths import AnyPath, reading

_READ_BYTES = 1 << 16
# Compressed bytes unpacked at a time: the result is held whole, and repetitive text can shrink by
# a factor of several thousand.
_SLICE_BYTES = 1 << 12
_LARGEST_WINDOW = 1 << 31  # frames made with `zstd --long`


class BadFile(Exception):
    """A file that cannot be read to its end; the message says why, without the file's name."""


@dataclass(frozen=True)
class _Packing:
    name: str
    start: bytes  # of every file
    new: Callable[[], Any]  # decompressor of one frame: decompress, eof, unused_data
    errors: tuple[type[Exception], ...]
    padding: bool = False  # NUL bytes may follow a frame


def _new_zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()


PACKINGS = {
    ".gz": _Packing("gzip", b"\x1f\x8b", lambda: zlib.decompressobj(31), (zlib.error,), True),
    ".zst": _Packing("zstd", b"\x28\xb5\x2f\xfd", _new_zstd, (zstandard.ZstdError,)),
    ".xz": _Packing("xz", b"\xfd7zXZ\x00", lzma.LZMADecompressor, (lzma.LZMAError,), True),
    ".bz2": _Packing("bzip2", b"BZh", bz2.BZ2Decompressor, (OSError,)),
}
_PARQUET_START = b"PAR1\x15"
_OTHER_CONTENT = {  # what a supposed text file may really be, by its first bytes
    b"version https://git-lfs": "a Git LFS pointer, not the data: run `git lfs pull`",
    **{p.start: f"{p.name} data: its name should end in {end}"
       for end, p in PACKINGS.items() if end != ".bz2"},
    **{b"BZh%d1AY&SY" % level: "bzip2 data: its name should end in .bz2" for level in range(1, 10)},
    _PARQUET_START: "Parquet data: its name should end in .parquet",
    b"PK\x03\x04": "a zip archive: unpack it",
    codecs.BOM_UTF32_LE: "UTF-32 text: convert it to UTF-8",  # before UTF-16: it begins the same
    codecs.BOM_UTF32_BE: "UTF-32 text: convert it to UTF-8",
    b"\xff\xfe": "UTF-16 text: convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text: convert it to UTF-8",
}  # fmt: skip


class ByteStream:
    """The decompressed bytes of a .gz, .zst, .xz, .bz2 or plain file, in chunks.

    `on_position` is called with the number of bytes of the stored file read so far.

    Iterating raises BadFile for truncated or damaged streams, for content that contradicts the
    name, and when the file cannot be read. Concatenated frames are read to the last one.
    """

    def __init__(self, path: AnyPath, on_position: Callable[[int], None] = lambda position: None):
        with reading(BadFile):
            self._raw: BinaryIO = path.open("rb")
        self._on_position = on_position
        self._suffix = path.suffix.lower()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def __iter__(self) -> Iterator[bytes]:
        packing = PACKINGS.get(self._suffix)
        with reading(BadFile):
            first = self._raw.read(_READ_BYTES)
        refuse_other_content(first, self._suffix)
        chunks = self._chunks(first, _READ_BYTES if packing is None else _SLICE_BYTES)
        if packing is None:
            yield from chunks
            return
        head = True
        for chunk in _unpacked(packing, chunks):
            if head:
                refuse_other_content(chunk[:64], inside=True)
            head = False
            yield chunk

    def _chunks(self, chunk: bytes, size: int) -> Iterator[bytes]:
        position = 0
        while chunk:
            for start in range(0, len(chunk), size):
                part = chunk[start : start + size]
                position += len(part)
                self._on_position(position)
                yield part
            with reading(BadFile):
                chunk = self._raw.read(_READ_BYTES)


def _unpacked(packing: _Packing, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Unpack every frame.

    gzip.open, bz2.open and lzma.open also read several frames and detect truncation. But bz2 and
    lzma take anything after a frame that is not a frame for padding, so a damaged second frame
    would be lost silently; zstandard's reader ends silently at a truncation.
    """
    frame, frames = None, 0
    for packed in chunks:
        while packed:
            if frame is None:
                packed = packed.lstrip(b"\0") if packing.padding and frames else packed
                if not packed:
                    break
                frame = packing.new()
                frames += 1
            try:
                text = frame.decompress(packed)
            except packing.errors as error:
                cause = str(error).rsplit("error: ", 1)[-1]
                raise BadFile(f"is not intact {packing.name} data: {cause}") from None
            if text:
                yield text
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise BadFile(f"is truncated: the {packing.name} stream ends early")
    if not frames:
        raise BadFile(f"is empty: not even a {packing.name} header")


def refuse_other_content(head: bytes, suffix: str = "", *, inside: bool = False) -> None:
    """Raise BadFile when the first bytes belong to content other than the suffix says.

    `inside`: the bytes were unpacked, and may be Parquet.
    """
    own = PACKINGS[suffix].start if suffix in PACKINGS else None
    own = _PARQUET_START if suffix == ".parquet" else own
    for start, content in _OTHER_CONTENT.items():
        if inside and start == _PARQUET_START:
            continue
        if head.startswith(start) and not (own and start.startswith(own)):
            raise BadFile(f"is {content}")

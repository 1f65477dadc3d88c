"""Stream documents from .txt, .jsonl, .json and .parquet files, compressed or not.

`read_records` splits a file into records without parsing them, which is cheap enough for one
process; `read_document` extracts the text of a record and can run in another process.
"""

import codecs
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cem_jax.data.corpus.compression import BadFile, ByteStream, refuse_other_content
from cem_jax.data.corpus.files import file_format
from cem_jax.data.corpus.large_json import (
    BadRecord,
    LongString,
    array_elements,
    character_start,
    parse_cut,
)
from cem_jax.data.corpus.limits import LIMITS, Limits
from cem_jax.data.corpus.parquet import parquet_rows
from cem_jax.storage.paths import AnyPath, reading

UNKNOWN_SOURCE = "unknown"
# These faults say nothing about the file; if all of its records have others, the file itself is
# bad.
HARMLESS = ("empty_text", "null_text")
_BOM = codecs.BOM_UTF8
_SURROGATES = re.compile("[\ud800-\udfff]")


class Fields(NamedTuple):
    """The fields of a record to read: a.b is field b of field a, unless a field is called a.b."""

    text: str
    source: str | None = None  # names the record's source


class Record(NamedTuple):
    line: int  # 1-based line of the file, or row of a Parquet file
    data: bytes | bytearray | None  # text as UTF-8, or an unparsed JSON value
    is_json: bool = False
    source: Any = None  # of a Parquet row
    fault: str | None = None  # why it has no text

    def size(self) -> int:
        """Return the approximate number of bytes held."""
        return len(self.data or b"")


def read_records(
    path: AnyPath,
    fields: Fields,
    on_position: Callable[[int], None] = lambda position: None,
    limits: Limits = LIMITS,
) -> Iterator[Record]:
    """Yield the records of one file in order; `on_position` gets the stored bytes read so far.

    Only LF ends a .jsonl record. A .json file may hold an array or one object per line. Raises
    BadFile when the file cannot be read to its end or has no such column.
    """
    form = file_format(path)
    if form.startswith(".parquet"):
        for row, text, source in parquet_rows(path, fields.text, fields.source, on_position):
            yield Record(row, text, source=source)
        return
    with ByteStream(path, on_position) as stream:
        chunks = iter(stream)
        if form.startswith(".txt"):
            whole = _joined(chunks, limits.largest)
            yield _too_long(1) if whole is None else Record(1, _without_bom(whole))
        elif form.startswith(".jsonl"):
            yield from _line_records(chunks, limits.largest, array_hint=True)
        else:
            yield from _json_records(chunks, limits.largest)


def check_start(path: AnyPath) -> None:
    """Raise BadFile when the first bytes of a local file contradict its name.

    This is cheap enough to do for all files before any is read.
    """
    if not isinstance(path, Path):
        return
    with reading(BadFile), path.open("rb") as raw:
        refuse_other_content(raw.read(64), path.suffix.lower())


class Piece(NamedTuple):
    text: str
    utf8: bytes
    mended: bool  # lone surrogates, which UTF-8 cannot express, became U+FFFD


def read_document(
    record: Record, fields: Fields, limits: Limits = LIMITS
) -> tuple[str | None, Iterator[Piece]]:
    """Return a record's source (None if it has no such field) and its text in pieces.

    Raises BadRecord: missing_column, null_text, not_a_string, not_an_object, too_long,
    invalid_json, invalid_utf8 or empty_text (only whitespace); the last three possibly only while
    the pieces are read.
    """
    text, source = record.data, record.source
    if record.fault:
        raise BadRecord(record.fault)
    if record.is_json:
        element, strings = parse_cut(text, limits)
        text = _field(element, fields.text)
        text = strings.get(text, text) if isinstance(text, str) else text
        if fields.source:
            source = _field(element, fields.source, absent=None)
    if text is None:
        raise BadRecord("null_text")
    if not isinstance(text, str | bytes | bytearray | LongString):
        raise BadRecord("not_a_string")
    return _source_name(source), _pieces(text, limits.piece)


def _field(element: Any, path: str, **default: Any) -> Any:
    if not isinstance(element, dict):
        raise BadRecord("not_an_object")
    if path in element:
        return element[path]
    first, _, rest = path.partition(".")
    if rest and isinstance(element.get(first), dict):
        return _field(element[first], rest, **default)
    if default:
        return default["absent"]
    raise BadRecord("missing_column")


def _source_name(value: Any) -> str | None:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value).strip() or None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | float) else None


def _pieces(text: str | bytes | bytearray | LongString, size: int) -> Iterator[Piece]:
    if isinstance(text, str):
        parts = iter((text,))
    elif isinstance(text, LongString):
        parts = text.pieces(size)
    else:
        parts = _decoded(text, size)
    empty = True
    for part in parts:
        empty = empty and (not part or part.isspace())
        try:
            yield Piece(part, part.encode(), False)
        except UnicodeEncodeError:
            mended = _SURROGATES.sub("\ufffd", part)
            yield Piece(mended, mended.encode(), True)
    if empty:
        raise BadRecord("empty_text")


def _decoded(raw: bytes | bytearray, size: int) -> Iterator[str]:
    start = 0
    while start < len(raw):
        end = start + size
        end = len(raw) if end >= len(raw) else character_start(raw, end)
        try:
            yield raw[start:end].decode()
        except UnicodeDecodeError:
            raise BadRecord("invalid_utf8") from None
        start = end


def _joined(chunks: Iterator[bytes], largest: int) -> bytearray | None:
    """Join all bytes; return None if there are too many."""
    whole = bytearray()  # grows in place; joining would hold everything twice
    for chunk in chunks:
        if len(whole) > largest:
            whole.clear()
            for _ in chunks:  # read on to the end: the file may be truncated
                pass
            return None
        whole += chunk
    return whole


def _line_records(
    chunks: Iterator[bytes], largest: int, array_hint: bool = False
) -> Iterator[Record]:
    for number, line in enumerate(_lines(chunks, largest), start=1):
        if line is None:
            yield _too_long(number)
            continue
        line = _without_bom(line)  # of the file, or of one that was concatenated to it
        if number == 1 and array_hint and line[:64].lstrip().startswith(b"["):
            raise BadFile("is a JSON array, not one object per line: its name should end in .json")
        if line and not line.isspace():
            yield Record(number, line, is_json=True)


def _lines(chunks: Iterator[bytes], largest: int) -> Iterator[bytes | bytearray | None]:
    """Yield lines, which only LF ends; None for a line that is too long."""
    held: bytearray | None = bytearray()  # a line that continues in the next chunk
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        if held is not None:
            held += first
            if len(held) > largest:
                held = None
        if rest:
            yield held
            yield from rest[:-1]
            held = bytearray(rest[-1])
    if held is None or held:
        yield held


def _json_records(chunks: Iterator[bytes], largest: int) -> Iterator[Record]:
    """Yield an array's elements, or lines, since many .json files really hold JSON lines."""
    head = b""
    for chunk in chunks:
        head = _without_bom(head + chunk)
        if head.strip():
            break
    everything = itertools.chain([head] if head else [], chunks)
    if head.lstrip().startswith(b"["):
        for line, element in array_elements(everything, largest):
            yield Record(line, element, is_json=True)
    else:
        yield from _line_records(everything, largest)


def _too_long(line: int) -> Record:
    return Record(line, None, fault="too_long")


def _without_bom(raw: bytes | bytearray) -> bytes | bytearray:
    while raw.startswith(_BOM):  # twice where an empty file with a mark was concatenated
        raw = raw[len(_BOM) :]
    return raw

"""Documents out of text files: .txt, .jsonl, .json (packed or not) and .parquet, streaming.

`read_records` splits a file into records without looking into them, cheap enough for one
process; `document_text` takes the text out of a record and can run in another process.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cem_jax.data.compression import BadFile, ByteStream, refuse_other_content
from cem_jax.data.files import file_format

_BOM = codecs.BOM_UTF8
# Numbers are never text, and Python refuses to make integers of more than 4300 digits.
_JSON = json.JSONDecoder(parse_int=float)
_SURROGATES = re.compile("[\ud800-\udfff]")
_CUT_OFF = 16  # characters before a text's end at which a cut-off JSON value can be noticed
_PARQUET_ROWS = 64  # rows decoded at a time; one may hold megabytes


class BadRecord(Exception):
    """One record without usable text; the message is the reason's name in `dropped`."""


class Record(NamedTuple):
    line: int  # 1-based line of the file, or row of a Parquet file
    kind: str  # json: bytes of an object still to be parsed | value: its text column as it is
    data: Any

    def size(self) -> int:
        """Bytes or characters held, roughly."""
        return len(self.data) if isinstance(self.data, bytes | str) else 1


def read_records(
    path: Path, column: str, on_position: Callable[[int], None] = lambda position: None
) -> Iterator[Record]:
    """The records of one file, in order; `on_position` hears how many bytes on disk were read.

    Only LF ends a .jsonl record. A .json file may hold an array or one object a line. Raises
    BadFile when the file cannot be read to its end or has no such column.
    """
    form = file_format(path)
    if form == ".parquet":
        yield from _parquet_rows(path, column, on_position)
        return
    with ByteStream(path) as stream:
        chunks = _watched(stream, on_position)
        if form.startswith(".txt"):
            text = _without_bom(b"".join(chunks))
            yield Record(1, "value", text)
        elif form.startswith(".jsonl"):
            yield from _jsonl_records(chunks, array_hint=True)
        else:
            yield from _json_records(chunks, column)


class Document(NamedTuple):
    text: str
    utf8: bytes
    repaired: str | None  # what had to be mended: lone_surrogate


def document_text(record: Record, column: str) -> Document:
    """The document of a record; lone surrogates, which UTF-8 cannot express, become U+FFFD.

    Raises BadRecord: invalid_utf8, invalid_json, not_an_object, missing_column, null_text,
    not_a_string or empty_text (nothing but whitespace).
    """
    text = record.data
    if record.kind == "json":
        text = _column_of(_parse_json(record.data), column)
    if isinstance(text, bytes):
        text = _decode(text)
    if text is None:
        raise BadRecord("null_text")
    if isinstance(text, Missing):
        raise BadRecord(text.reason)
    if not isinstance(text, str):
        raise BadRecord("not_a_string")
    if not text or text.isspace():
        raise BadRecord("empty_text")
    try:
        return Document(text, text.encode(), None)
    except UnicodeEncodeError:
        mended = _SURROGATES.sub("\ufffd", text)
        return Document(mended, mended.encode(), "lone_surrogate")


class Missing(NamedTuple):
    """In place of a text: an array's element that has none, and why."""

    reason: str


def _watched(stream: ByteStream, on_position: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in stream:
        on_position(stream.position())
        yield chunk


def _jsonl_records(chunks: Iterator[bytes], array_hint: bool = False) -> Iterator[Record]:
    for number, line in enumerate(_lines(chunks), start=1):
        if number == 1:
            line = _without_bom(line)
            if array_hint and line.lstrip().startswith(b"["):
                raise BadFile(
                    "is a JSON array, not one object a line: its name should end in .json"
                )
        if line.strip():
            yield Record(number, "json", line)


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Records ended by LF alone; the parts of a long one are joined once."""
    parts: list[bytes] = []
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        parts.append(first)
        if rest:
            yield b"".join(parts)
            yield from rest[:-1]
            parts = [rest[-1]]
    if last := b"".join(parts):
        yield last


def _json_records(chunks: Iterator[bytes], column: str) -> Iterator[Record]:
    """An array's elements, or, since many .json files are really lines, one object a line."""
    head = b""
    for chunk in chunks:
        head += chunk
        if _without_bom(head).strip():
            break
    everything = _resumed(_without_bom(head), chunks)
    if _without_bom(head).lstrip().startswith(b"["):
        for line, element in _array_elements(everything):
            yield Record(line, "value", _safe_column(element, column))
    else:
        yield from _jsonl_records(everything)


def _resumed(head: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if head:
        yield head
    yield from rest


def _array_elements(chunks: Iterator[bytes]) -> Iterator[tuple[int, Any]]:
    """(line, element) of a JSON array, one at a time; BadFile where its syntax breaks."""
    source = _ArrayText(chunks)
    source.expect("[")
    if source.peek() == "]":
        source.expect("]")
    else:
        while True:
            source.peek()
            line = source.line
            yield line, source.element()
            if source.peek() == "]":
                source.expect("]")
                break
            source.expect(",")
    if source.peek():
        raise BadFile(f"has text after its JSON array, at line {source.line}")


class _ArrayText:
    """A window of decoded JSON text that grows until one element fits."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks = chunks
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self.line = 1

    def peek(self) -> str:
        """The next character that is no whitespace; '' at the end."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            self.line += self._text.count("\n", start, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._grow(1):
                return ""

    def expect(self, character: str) -> None:
        found = self.peek()
        if found != character:
            what = f"{found!r}" if found else "the end of the file"
            raise BadFile(f"is no JSON array: {what} instead of {character!r} at line {self.line}")
        self._at += 1

    def element(self) -> Any:
        while True:
            try:
                value, end = _JSON.raw_decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                # Where it is only cut off: read on, doubling, so that the cost stays linear.
                if self._is_cut_off(error) and self._grow(len(self._text) - self._at):
                    continue
                raise BadFile(
                    f"is no intact JSON array, from line {self.line} on: {error}"
                ) from None
            if end == len(self._text) and self._grow(1):
                continue  # a number may go on in the next chunk
            self.line += self._text.count("\n", self._at, end)
            self._at = end
            return value

    def _is_cut_off(self, error: Exception) -> bool:
        return isinstance(error, json.JSONDecodeError) and (
            error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _CUT_OFF
        )

    def _grow(self, least: int) -> bool:
        """Decode at least so many characters more, if there are any; drop what was consumed."""
        parts = [self._text[self._at :]]
        added = 0
        while added < least:
            chunk = next(self._chunks, None)
            try:
                part = self._utf8.decode(chunk or b"", final=chunk is None)
            except UnicodeDecodeError:
                raise BadFile(f"is not valid UTF-8, after line {self.line}") from None
            parts.append(part)
            added += len(part)
            if chunk is None:
                break
        self._text = "".join(parts)
        self._at = 0
        return added > 0


def _parquet_rows(path: Path, column: str, on_position: Callable[[int], None]) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as raw:
            refuse_other_content(raw.read(64), allowed=".parquet")
        with pyarrow.parquet.ParquetFile(path) as table:
            kind = _parquet_column(table.schema_arrow, column)
            row, total, size = 0, table.metadata.num_rows, path.stat().st_size
            for batch in table.iter_batches(_PARQUET_ROWS, columns=[column]):
                # As bytes: a value that is not UTF-8 then costs itself alone.
                for value in batch.column(0).cast(kind).cast(pyarrow.large_binary()).to_pylist():
                    row += 1
                    yield Record(row, "value", value)
                on_position(size * row // max(1, total))
    except OSError as error:
        raise BadFile(f"cannot be read: {error.strerror or error}") from None
    except pyarrow.ArrowException as error:
        raise BadFile(f"is not intact Parquet data: {str(error).splitlines()[0]}") from None


def _parquet_column(schema: Any, column: str) -> Any:
    """The large string or binary type to read a column as; BadFile when it holds no text."""
    import pyarrow

    if column not in schema.names:
        raise BadFile(f"has no column {column!r}; its columns are {', '.join(schema.names)}")
    kind = schema.field(column).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    strings = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    binaries = (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view())
    if kind in strings:
        return pyarrow.large_string()
    if kind in binaries:
        return pyarrow.large_binary()
    raise BadFile(f"has {kind} values in column {column!r}, not text")


def _parse_json(line: bytes) -> Any:
    text = _decode(line)
    try:
        return _JSON.decode(text)
    except (json.JSONDecodeError, RecursionError):
        raise BadRecord("invalid_json") from None


def _column_of(element: Any, column: str) -> Any:
    if not isinstance(element, dict):
        raise BadRecord("not_an_object")
    if column not in element:
        raise BadRecord("missing_column")
    return element[column]


def _safe_column(element: Any, column: str) -> Any:
    try:
        return _column_of(element, column)
    except BadRecord as bad:
        return Missing(str(bad))


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise BadRecord("invalid_utf8") from None


def _without_bom(raw: bytes) -> bytes:
    return raw.removeprefix(_BOM)

"""JSON with strings of hundreds of megabytes: arrays cut into elements, strings into pieces.

Python's parser holds a document twice as text and once as UTF-8: up to nine bytes per byte. Long
strings are therefore cut out of the bytes and decoded a megabyte at a time. ijson also reads arrays
in pieces, but it stops at the first invalid element, which here costs one record; it does not
report an element's line; and it builds each string whole.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from cem_jax.data.corpus.compression import BadFile
from cem_jax.data.corpus.limits import LIMITS, Limits

_LONGEST_ESCAPE = 6
# Numbers are never text, and Python refuses integers of more than 4300 digits.
_JSON = json.JSONDecoder(parse_int=float)
_BRACKETS = re.compile(rb'["{}\[\]]')
_SCALAR_END = re.compile(rb"[\s,\]}]")
_SPACE = re.compile(rb"[ \t\r\n]*")


class BadRecord(Exception):
    """A record without usable text; the message is the reason's name in `dropped`."""


class LongString(NamedTuple):
    """A JSON string that is not decoded yet: the bytes between its quotes."""

    raw: bytes | bytearray
    start: int
    end: int

    def pieces(self, size: int = LIMITS.piece) -> Iterator[str]:
        """Decode the text piece by piece; raise BadRecord where it is not valid JSON or UTF-8."""
        high = ""  # the first half of a surrogate pair split between two pieces
        start = self.start
        while start < self.end:
            end = self._cut(start, size)
            text = parse(b'"%b"' % self.raw[start:end])
            if high and "\udc00" <= text[:1] <= "\udfff":
                text = chr(0x10000 + (ord(high) - 0xD800 << 10) + ord(text[0]) - 0xDC00) + text[1:]
            else:
                text = high + text
            high = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" and end < self.end else ""
            yield text.removesuffix(high)
            start = end

    def _cut(self, start: int, size: int) -> int:
        """Find the end of a piece, inside neither an escape nor a character."""
        end = start + size
        if end >= self.end:
            return self.end
        block = self.raw[start:end]
        slash = block.rfind(b"\\", len(block) - _LONGEST_ESCAPE)
        if slash >= 0 and (slash + 1 - len(block[: slash + 1].rstrip(b"\\"))) % 2:
            return start + slash
        return character_start(self.raw, end)


def character_start(raw: bytes | bytearray, at: int) -> int:
    """Return the last position up to `at` that cuts no UTF-8 character; `at` if none is near."""
    return next((i for i in range(at, at - 4, -1) if raw[i] & 0xC0 != 0x80), at)


def parse(raw: bytes | bytearray) -> Any:
    """Parse a JSON value; raise BadRecord (invalid_utf8, invalid_json) if it is not valid."""
    try:
        return _JSON.decode(raw.decode())
    except UnicodeDecodeError:
        raise BadRecord("invalid_utf8") from None
    except (json.JSONDecodeError, RecursionError):
        raise BadRecord("invalid_json") from None


def parse_cut(raw: bytes | bytearray, limits: Limits = LIMITS) -> tuple[Any, dict[str, LongString]]:
    """Parse a JSON value with names in place of long strings; return it and {name: string}."""
    if len(raw) < limits.long_json:
        return parse(raw), {}
    mark = "cut"
    while mark.encode() in raw:
        mark += "-"
    kept: list[bytes] = []
    strings: dict[str, LongString] = {}
    at = 0
    for start, end in _string_spans(raw):
        if end - start >= limits.long_string:
            name = f"{mark}{len(strings)}"
            strings[name] = LongString(raw, start, end)
            kept += [raw[at:start], name.encode()]
            at = end
    kept.append(raw[at:])
    return parse(b"".join(kept)), strings


def _string_spans(raw: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield (start, end) between every string's quotes; raise BadRecord if the last is open."""
    at = 0
    while (quote := raw.find(b'"', at)) >= 0:
        end = string_end(raw, quote + 1)
        if end < 0:
            raise BadRecord("invalid_json")
        yield quote + 1, end
        at = end + 1


def string_end(raw: bytes | bytearray, at: int, start: int | None = None) -> int:
    """Find the closing quote, at or after `at`, of the string at `start`; -1: not here."""
    start = at if start is None else start
    while (at := raw.find(b'"', at)) >= 0:
        first = at
        while first > start and raw[first - 1] == 0x5C:
            first -= 1
        if (at - first) % 2 == 0:
            return at
        at += 1
    return -1


def array_elements(
    chunks: Iterator[bytes], largest: int = LIMITS.largest
) -> Iterator[tuple[int, bytes]]:
    """Yield (line, bytes) of each element of a JSON array; raise BadFile where it is malformed."""
    source = _ArrayBytes(chunks, largest)
    source.expect(b"[")
    if source.peek() == b"]":
        source.expect(b"]")
    else:
        while True:
            source.peek()
            line = source.line
            yield line, source.element()
            if source.peek() == b"]":
                source.expect(b"]")
                break
            source.expect(b",")
    if source.peek():
        raise BadFile(f"has text after its JSON array, at line {source.line}")


class _ArrayBytes:
    """A window of a JSON array's bytes that grows until one element fits."""

    def __init__(self, chunks: Iterator[bytes], largest: int):
        self._chunks, self._largest = chunks, largest
        self._raw = bytearray()
        self._at = 0
        self.line = 1

    def peek(self) -> bytes:
        """Return the next byte that is not whitespace; b"" at the end."""
        while True:
            end = _SPACE.match(self._raw, self._at).end()
            self.line += self._raw.count(b"\n", self._at, end)
            self._at = end
            if end < len(self._raw):
                return bytes(self._raw[end : end + 1])
            del self._raw[:]
            self._at = 0
            if not self._grow():
                return b""

    def expect(self, character: bytes) -> None:
        found = self.peek()
        if found != character:
            what = repr(found.decode("latin-1")) if found else "the end of the file"
            raise BadFile(
                f"is not a JSON array: {what} instead of {character.decode()!r} at line {self.line}"
            )
        self._at += 1

    def element(self) -> bytes:
        """Return the bytes of the element that begins here, valid JSON or not."""
        first = self.peek()
        del self._raw[: self._at]
        if first == b'"':
            end = self._after_string(1)
        elif first in (b"{", b"["):
            end = self._after_brackets()
        else:
            end = self._find(_SCALAR_END, 0).start()
        element = bytes(memoryview(self._raw)[:end])
        self.line += element.count(b"\n")
        self._at = end
        return element

    def _after_brackets(self) -> int:
        at = depth = 0
        while True:
            found = self._find(_BRACKETS, at)
            at = found.end()
            if found.group() == b'"':
                at = self._after_string(at)
                continue
            depth += 1 if found.group() in b"{[" else -1
            if depth == 0:
                return at

    def _after_string(self, start: int) -> int:
        at = start
        while (end := string_end(self._raw, at, start)) < 0:
            at = len(self._raw)
            self._more()
        return end + 1

    def _find(self, pattern: re.Pattern[bytes], at: int) -> re.Match[bytes]:
        while not (found := pattern.search(self._raw, at)):
            at = len(self._raw)
            self._more()
        return found

    def _more(self) -> None:
        if len(self._raw) > self._largest:
            raise BadFile(
                f"has an element of more than {self._largest:,} bytes at line {self.line}"
            )
        if not self._grow():
            raise BadFile(f"ends inside its JSON array, in the element at line {self.line}")

    def _grow(self) -> bool:
        chunk = next(self._chunks, b"")
        self._raw += chunk
        return bool(chunk)

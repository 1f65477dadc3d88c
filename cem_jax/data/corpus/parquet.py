"""Rows of Parquet files, a few at a time however large their row groups are."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from cem_jax.data.corpus.compression import PACKINGS, BadFile, ByteStream, refuse_other_content
from cem_jax.errors import UserError
from cem_jax.storage.paths import AnyPath, reading

_ROWS, _BYTES = 64, 2 << 20  # decoded at a time, whichever is less


def parquet_rows(
    path: AnyPath, text: str, source: str | None, on_position: Callable[[int], None]
) -> Iterator[tuple[int, bytes | None, Any]]:
    """Yield (1-based row, text, source) of a file, compressed or not; column a.b is nested.

    Raises BadFile when the file is not intact or its text column holds something else.
    """
    import pyarrow
    import pyarrow.parquet

    size = path.stat().st_size
    with _seekable(path) as raw:
        refuse_other_content(raw.read(64), ".parquet")
        raw.seek(0)
        try:
            table = pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20)
            for row, value, name in _rows(table, text, source):
                yield row, value, name
                on_position(size * row // table.metadata.num_rows)
        except pyarrow.ArrowException as error:
            fault = str(error).splitlines()[0]
            raise BadFile(f"is not intact Parquet data: {fault}") from None
        except OSError as error:
            raise BadFile(f"is not intact Parquet data: {error}") from None


@contextlib.contextmanager
def _seekable(path: AnyPath) -> Iterator[BinaryIO]:
    """Open the file, or an unpacked copy on disk: Parquet is read from its end."""
    if path.suffix.lower() not in PACKINGS:
        with reading(BadFile):
            raw = path.open("rb")
        with raw:
            yield raw
        return
    with ByteStream(path) as stream, contextlib.ExitStack() as held:
        with _temporary(path):
            raw = held.enter_context(tempfile.TemporaryFile())
        for chunk in stream:
            with _temporary(path):
                raw.write(chunk)
        with _temporary(path):
            raw.seek(0)
        yield raw


@contextlib.contextmanager
def _temporary(path: AnyPath) -> Iterator[None]:
    """Turn errors of writing the unpacked copy into a UserError that names TMPDIR."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or "the temporary directory"
        raise UserError(
            f"TMPDIR ({folder}): cannot hold {path} unpacked: {error.strerror or error}; "
            "set TMPDIR to a directory with more space"
        ) from None


def _rows(table: Any, text: str, source: str | None) -> Iterator[tuple[int, bytes | None, Any]]:
    import pyarrow

    schema = table.schema_arrow
    kind = _text_type(schema, text)
    if source and _column_type(schema, source) is None:
        source = None
    names = [text, source] if source else [text]
    row = 0
    for batch in table.iter_batches(_rows_at_once(table, text), columns=names):
        # As bytes, so that a value that is not UTF-8 costs only one record.
        values = _column(batch, text).cast(kind).cast(pyarrow.large_binary()).to_pylist()
        sources = _column(batch, source).to_pylist() if source else [None] * len(values)
        for value, name in zip(values, sources, strict=True):
            row += 1
            yield row, value, name


def _rows_at_once(table: Any, path: str) -> int:
    size = rows = 0
    for i in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(i)
        rows += group.num_rows
        columns = (group.column(j) for j in range(group.num_columns))
        size += sum(c.total_uncompressed_size for c in columns if c.path_in_schema == path)
    return max(1, min(_ROWS, _BYTES * rows // max(1, size)))


def _column_type(schema: Any, path: str) -> Any:
    """Return the type of a column, nested ones as a.b; None if there is no such column."""
    import pyarrow

    if schema.names.count(path) > 1:
        raise BadFile(f"has {schema.names.count(path)} columns called {path!r}")
    if path in schema.names:
        return schema.field(path).type
    first, *rest = path.split(".")
    kind = schema.field(first).type if first in schema.names else None
    for name in rest:
        if kind is None or not pyarrow.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _column(batch: Any, path: str) -> Any:
    import pyarrow.compute

    if path in batch.schema.names:
        return batch.column(path)
    first, *rest = path.split(".")
    return pyarrow.compute.struct_field(batch.column(first), rest)


def _text_type(schema: Any, path: str) -> Any:
    """Return the large string or binary type to read a column as; BadFile if it holds no text."""
    import pyarrow

    kind = _column_type(schema, path)
    if kind is None:
        raise BadFile(f"has no column {path!r}; its columns are {', '.join(schema.names)}")
    stored = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if pyarrow.types.is_null(stored):  # what Arrow infers from a column without any value
        return pyarrow.large_string()
    if stored in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        return pyarrow.large_string()
    if stored in (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view()):
        return pyarrow.large_binary()
    raise BadFile(f"has {kind} values in column {path!r}, not text")

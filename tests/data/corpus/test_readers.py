import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from cem_jax.data.corpus.compression import BadFile
from cem_jax.data.corpus.large_json import BadRecord
from cem_jax.data.corpus.readers import Fields, read_document, read_records

PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


def read(path, column="text"):
    """Return [(line, text or the reason it was dropped)]."""
    result = []
    fields = Fields(column)
    for record in read_records(path, fields):
        try:
            text = "".join(piece.text for piece in read_document(record, fields)[1])
            result.append((record.line, text))
        except BadRecord as bad:
            result.append((record.line, f"!{bad}"))
    return result


def jsonl(*texts):
    return b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts)


@pytest.mark.parametrize("packing", PACKED)
def test_every_format_packed_or_not(tmp_path, packing):
    texts = ["one\nline", "zwei ü", "\u2028 three"]
    contents = {
        ".txt": "".join(texts).encode(),
        ".jsonl": jsonl(*texts),
        ".json": json.dumps([{"text": t} for t in texts], indent=1).encode(),
    }
    for suffix, content in contents.items():
        path = tmp_path / f"a{suffix}{packing}"
        path.write_bytes(PACKED[packing](content))
        expected = ["".join(texts)] if suffix == ".txt" else texts
        assert [text for _, text in read(path)] == expected


@pytest.mark.parametrize("packing", [".gz", ".zst", ".xz", ".bz2"])
def test_concatenated_frames_and_truncation(tmp_path, packing):
    path = tmp_path / f"a.jsonl{packing}"
    first, second = (PACKED[packing](jsonl(*(f"{k} {i}" for i in range(999)))) for k in "ab")
    path.write_bytes(first + second)
    assert len(read(path)) == 1998
    for cut in (len(first + second) - 1, len(first) + 9, len(first) // 2, 3, 1):
        path.write_bytes((first + second)[:cut])
        with pytest.raises(BadFile, match=r"truncated|not intact"):
            read(path)
    path.write_bytes(b"")
    with pytest.raises(BadFile, match="empty"):
        read(path)
    path.write_bytes(PACKED[packing](b""))
    assert read(path) == []
    damaged = bytearray(first)
    damaged[len(first) // 2] ^= 255
    path.write_bytes(damaged)
    with pytest.raises(BadFile):
        read(path)


@pytest.mark.parametrize(
    ("packing", "library"), [(".gz", gzip), (".bz2", bz2), (".xz", lzma), (".zst", None)]
)
def test_a_damaged_frame_after_an_intact_one_is_detected(tmp_path, packing, library):
    """bz2 and lzma take it for padding, so its documents would be lost silently."""
    path = tmp_path / f"a.jsonl{packing}"
    second = bytearray(PACKED[packing](jsonl("b")))
    second[0] ^= 255
    path.write_bytes(PACKED[packing](jsonl("a")) + second)
    if library in (bz2, lzma):
        with library.open(path) as file:
            assert file.read() == jsonl("a")
    with pytest.raises(BadFile, match="is not intact"):
        read(path)


def test_zstd_skippable_frames_are_skipped(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    path.write_bytes(skippable + zstandard.compress(jsonl("a")) + skippable)
    assert read(path) == [(1, "a")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.zst", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "should end in .gz"),
        ("a.jsonl.gz", zstandard.compress(b"{}"), "should end in .zst"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "should end in .gz"),
        ("a.jsonl.zst", b"plain text", "not intact zstd"),
        ("a.jsonl.gz", b"plain text", "not intact gzip"),
        ("a.txt", "text".encode("utf-16"), "UTF-16"),
        ("a.txt", b"PK\x03\x04", "zip"),
        ("a.parquet", b"plain text, and rather long", "Parquet"),
        ("a.parquet", b"", "Parquet"),
        ("a.jsonl", b'[{"text": "a"}]', "should end in .json"),
        ("a.json", b'[{"text": "a"}, {"te', "ends inside its JSON array, in the element at line 1"),
        ("a.json", b'[{"text": "a"}, 12', "ends inside its JSON array"),
        ("a.json", b'[{"text": "a"}', "the end of the file instead of ','"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "instead of ','"),
        ("a.json", b'[{"text": "a"}] x', "after its JSON array"),
    ],
)
def test_files_whose_content_contradicts_their_name(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadFile, match=words):
        read(path)


def test_bad_records_are_located(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        b"\xef\xbb\xbf" + b'{"text": "bom"}\r',
        b"",
        b'{"text": "a"}{"text": "b"}',
        b'{"text": "caf\xe9"}',
        b'{"text": null}',
        b'{"text": 7}',
        b'{"text": ["a"]}',
        b'{"other": "a"}',
        b'"a"',
        b'{"text": " \\n\\t "}',
        b'{"text": "a \\ud83d b"}',
        b'{"text": "\\ud83d\\ude80"}',
        b"[" * 100_000,
        b'{"text": "big number", "n": ' + b"9" * 5000 + b"}",
        b'{"text": "first", "text": "last"}',
        '{"text": "a\u2028b\u0085c"}'.encode(),
        b'{"text": "nul \\u0000"}',
        b"\0\0\0",
        b'{"text": "no newline at the end"}',
    ]
    path.write_bytes(b"\n".join(lines))
    assert read(path) == [
        (1, "bom"),
        (3, "!invalid_json"),
        (4, "!invalid_utf8"),
        (5, "!null_text"),
        (6, "!not_a_string"),
        (7, "!not_a_string"),
        (8, "!missing_column"),
        (9, "!not_an_object"),
        (10, "!empty_text"),
        (11, "a \ufffd b"),
        (12, "🚀"),
        (13, "!invalid_json"),
        (14, "big number"),
        (15, "last"),
        (16, "a\u2028b\u0085c"),
        (17, "nul \0"),
        (18, "!invalid_json"),
        (19, "no newline at the end"),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_byte_order_marks_at_record_starts_are_passed_over(tmp_path, name):
    pack = gzip.compress if name.endswith(".gz") else bytes
    parts = [b"\xef\xbb\xbf" + jsonl("a", "b\ufeff"), b"\xef\xbb\xbf", b"\xef\xbb\xbf" + jsonl("c")]
    (tmp_path / name).write_bytes(b"".join(map(pack, parts)))
    assert read(tmp_path / name) == [(1, "a"), (2, "b\ufeff"), (3, "c")]


def test_json_arrays_stream_with_lines(tmp_path):
    elements = [{"text": "x" * (17 * i % 90_000)} if i % 7 else i for i in range(40)]
    path = tmp_path / "a.json"
    path.write_text("\n\n[\n" + ",\n".join(map(json.dumps, elements)) + "\n]\n\n")
    expected = []
    for line, element in enumerate(elements, start=4):
        text = element["text"] if isinstance(element, dict) else "!not_an_object"
        expected.append((line, text or "!empty_text"))
    assert read(path) == expected
    path.write_bytes(b"\xef\xbb\xbf []")
    assert read(path) == []


def test_json_files_may_hold_lines(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(jsonl("a", "b")))
    assert read(path) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())],
)
def test_parquet_types(tmp_path, kind):
    path = tmp_path / "a.parquet"
    values = pa.array(["a", None, "", "ü", "b"]).cast(kind)
    pq.write_table(pa.table({"id": range(5), "text": values}), path, row_group_size=2)
    expected = [(1, "a"), (2, "!null_text"), (3, "!empty_text"), (4, "ü"), (5, "b")]
    assert read(path) == expected


def test_parquet_rows_of_arrow_type_null_are_null_text(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.nulls(2), "doc": [{"text": None}] * 2}), path)
    assert read(path) == read(path, "doc.text") == [(1, "!null_text"), (2, "!null_text")]


def test_parquet_faults(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["a"], "n": [1]}), path)
    with pytest.raises(BadFile, match="no column 'text'; its columns are content, n"):
        read(path)
    with pytest.raises(BadFile, match="int64 values in column 'n'"):
        read(path, "n")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadFile, match="not intact Parquet"):
        read(path)
    raw = pa.array([b"good", b"\xff\xfe"], pa.binary())
    pq.write_table(pa.table({"text": raw}), path)
    assert read(path) == [(1, "good"), (2, "!invalid_utf8")]


def test_a_full_tmpdir_is_named(tmp_path, monkeypatch):
    import gzip

    from cem_jax.data.corpus import parquet
    from cem_jax.errors import UserError

    full = lambda: open("/dev/full", "w+b", buffering=0)  # noqa: SIM115 (closed with the stack)
    monkeypatch.setattr(parquet.tempfile, "TemporaryFile", full)
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(b"PAR1" * 100))
    with pytest.raises(UserError, match=r"TMPDIR .*a\.parquet\.gz unpacked: No space left"):
        list(parquet.parquet_rows(path, "text", None, lambda at: None))

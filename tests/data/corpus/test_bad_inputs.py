"""Bad records are skipped and reported, bad files stop everything: nothing is lost silently."""

import gzip
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import all_tokens, write_jsonl

from cem_jax.data.corpus.limits import LIMITS, Limits
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.dataset.store import open_dataset
from cem_jax.errors import UserError

GOOD = b'{"text": "good"}\n'


def run(path, model_file, **options):
    options.setdefault("validation_fraction", 0.0)
    return prepare([str(path)], model_file, path.parent / "out", **options)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b'{"text": \n{"text": \n', "none of its 2 records is valid: invalid_json 2"),
        ("a.jsonl", b'{"text": "\xff"}\n', "none of its 1 records is valid: invalid_utf8 1"),
        ("a.jsonl", b'["a"\n{"text": 1}\n', "a JSON array, not one object per line"),
        ("a.jsonl", b'{"text": 1}\n"text"\n', "not_a_string 1"),
        ("a.jsonl", b"just some prose\nand more\n", "invalid_json 2"),
        ("a.jsonl", b'{"body": "a"}\n{"body": "b"}\n', "no column 'text' in any record"),
        ("a.jsonl", b'{"body": "a"}\nbroken\n', "invalid_json 1, missing_column 1"),
        ("a.json", b'[{"text": nonsense}]', "invalid_json 1"),
        ("a.json", b'[{"text": "\xff"}]', "invalid_utf8 1"),
        ("a.json", b'{"text": "a",\n "more": 1}\n', "invalid_json 2"),  # one object, spread
        ("a.txt", b"caf\xe9", "invalid_utf8 1"),
        ("a.txt", "text".encode("utf-32"), "UTF-32"),
        ("a.jsonl.gz", gzip.compress(b"PAR1\x15" + b"\0" * 99, mtime=0), "invalid_json 1"),
        ("a.jsonl", b"\x80\x00\x01\x02" * 99, "invalid_utf8 1"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.txt.xz", b"\xfd7zXZ\x00", "truncated"),
        ("a.txt.bz2", b"", "is empty: not even a bzip2 header"),
        ("a.jsonl.zst", GOOD * 99, "not intact zstd"),
        ("a.parquet.gz", gzip.compress(b"no parquet inside", mtime=0), "not intact Parquet"),
    ],
)
def test_a_file_without_one_valid_record_is_a_bad_file(tmp_path, model_file, name, content, told):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        run(path, model_file)
    assert f"{path}: " in caught.value.messages[0] and told in caught.value.messages[0]
    assert "--skip-bad-files" in caught.value.messages[0]
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    result = prepare([str(tmp_path)], model_file, tmp_path / "out", skip_bad_files=True,
                     validation_fraction=0.0)  # fmt: skip
    assert result["documents"] == 1
    (bad,) = result["bad_files"]
    assert bad.startswith(f"{path}: ") and told in bad


def test_empty_documents_do_not_make_a_file_bad(tmp_path, model_file):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ""}\n{"text": null}\n{"text": " \\n"}\n')
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    result = prepare([str(tmp_path)], model_file, tmp_path / "out", validation_fraction=0.0)
    assert result["dropped"] == {"empty_text": 2, "null_text": 1}
    assert result["bad_files"] == []


def test_all_bad_starts_are_reported_before_any_work(tmp_path, model_file):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    write_jsonl(tmp_path / "c.jsonl", ["good"])
    with pytest.raises(UserError) as caught:
        prepare([str(tmp_path)], model_file, tmp_path / "out")
    assert [message.split(": ")[0] for message in caught.value.messages] == [
        f"{tmp_path}/a.jsonl.zst", f"{tmp_path}/b.jsonl.zst",
    ]  # fmt: skip


@pytest.mark.parametrize(("bad", "word"), [(1, "note"), (3, "warning")])
def test_more_than_one_in_a_hundred_dropped_is_a_warning(tmp_path, model_file, capsys, bad, word):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 120 + b"broken\n" * bad + GOOD * 120)
    run(path, model_file)
    told = capsys.readouterr().err
    assert f"cem: {word}: {bad} records dropped ({bad / (240 + bad):.2%}): invalid_json" in told
    assert f"{path}:121: invalid_json" in told


def test_duplicate_keys_nesting_and_separators_inside_text(tmp_path, model_file, tokenizer):
    path = tmp_path / "a.jsonl"
    deep = '{"text": "deep", "x": ' + "[" * 900 + "]" * 900 + "}"
    lines = [
        '{"text": "first", "text": "last"}',
        deep,
        '{"text": "a\u2028b\u2029c\u0085d"}',
        '{"text": "cr\\rlf\\nvt\\u000bff\\u000c"}\r',
        '{"text": "NaN beside", "n": NaN, "i": -Infinity}',
        '\ufeff{"text": "a mark in the middle of the file"}',
        '{"text": "<s> </s> <unk> <0x0A>"}',
        '{"text": "nul \\u0000 bell \\u0007"}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    result = run(path, model_file)
    assert result["dropped"] == {} and result["cases"] == []
    stream = all_tokens(open_dataset(tmp_path / "out"), "train")
    documents = ["last", "deep", "a\u2028b\u2029c\u0085d", "cr\rlf\nvt\x0bff\x0c", "NaN beside",
                 "a mark in the middle of the file", "<s> </s> <unk> <0x0A>",
                 "nul \0 bell \a"]  # fmt: skip
    expected = [i for text in documents for i in (1, *tokenizer.encode(text))]
    assert stream.tolist() == expected


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (pa.array([1.5, 2.5]), "has double values in column 'text'"),
        (pa.array([["a"], ["b"]]), "has list<"),
        (pa.array([{"b": "a"}, {"b": "b"}]), "has struct<"),
        (pa.array([None, None]), "dropped: null_text 2"),
    ],
)
def test_parquet_columns_that_hold_no_text(tmp_path, model_file, column, told):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError) as caught:
        run(tmp_path / "a.parquet", model_file)
    assert told in caught.value.messages[0]


def test_parquet_with_two_columns_of_the_same_name(tmp_path, model_file):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has 2 columns called 'text'"):
        run(tmp_path / "a.parquet", model_file)


def test_parquet_nested_column_and_empty_file(tmp_path, model_file):
    rows = [{"body": "a"}, {"body": None}, None, {"body": "b"}]
    pq.write_table(pa.table({"doc": rows}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"doc": pa.array([], pa.struct([("body", pa.string())]))}),
                   tmp_path / "b.parquet")  # fmt: skip
    result = prepare([str(tmp_path)], model_file, tmp_path / "out", column="doc.body",
                     validation_fraction=0.0)  # fmt: skip
    assert result["documents"] == 2
    assert result["dropped"] == {"empty_file": 1, "null_text": 2}


def test_a_line_that_is_too_long_costs_only_itself(tmp_path, model_file):
    limits = Limits(largest=100_000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"x" * 300_000 + b"\n" + GOOD)
    result = run(path, model_file, limits=limits)
    assert (result["documents"], result["cases"]) == (2, [f"{path}:2: too_long"])
    (tmp_path / "b.txt").write_bytes(b"x" * 300_000)
    with pytest.raises(UserError, match=r"b\.txt: none of its 1 records is valid: too_long 1"):
        prepare([str(tmp_path / "b.txt")], model_file, tmp_path / "out2", limits=limits)


def test_a_document_of_many_megabytes_is_encoded_like_any_other(
    tmp_path, model_file, texts, tokenizer
):
    """It is long enough to be cut out of its JSON; compare with sentencepiece on the whole."""
    text = "\n".join(texts) * 30 + " 🚀 é"
    assert len(text.encode()) > LIMITS.long_string
    row = json.dumps({"id": "x" * LIMITS.long_json, "text": text})
    (tmp_path / "a.jsonl").write_text(row + "\n" + json.dumps({"text": "next"}))
    result = run(tmp_path / "a.jsonl", model_file)
    assert result["bytes"] == len(text.encode()) + 4
    stream = all_tokens(open_dataset(tmp_path / "out"), "train")
    assert stream.tolist() == [1, *tokenizer.encode(text), 1, *tokenizer.encode("next")]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "json", "txt"])
def test_memory_stays_within_bounds_with_a_document_of_200_megabytes(tmp_path, model_file, form):
    """Peak memory is measured in a process of its own."""
    block = "one long line, é, 🚀 and so on; " * 1000
    count = 200_000_000 // len(block.encode())
    start, end = {"jsonl": ('{"text": "', '"}'), "json": ('[{"text": "', '"}]'), "txt": ("", "")}[
        form
    ]
    path = tmp_path / f"a.{form}"
    with path.open("w") as file:
        file.write(start)
        for _ in range(count):
            file.write(block)
        file.write(end)
    code = (
        "import sys\n"
        "from cem_jax.data.corpus.prepare import prepare\n"
        "prepare([sys.argv[1]], sys.argv[2], sys.argv[3], validation_fraction=0.0)\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path, model_file, tmp_path / "out"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 1_500_000  # kilobytes
    size = count * len(block.encode())
    assert open_dataset(tmp_path / "out").splits["train"].bytes == size

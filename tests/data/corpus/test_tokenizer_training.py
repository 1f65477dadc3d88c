import errno
import gzip
import json
import os
import sys
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece

from cem_jax.cli import main
from cem_jax.data.corpus.files import find_files
from cem_jax.data.corpus.tokenizer_training import (
    sample_documents,
    train_model,
    train_tokenizer,
)
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError


def test_newlines_and_indentation_are_learnt(tokenizer, texts):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model_bytes)
    pieces = [processor.id_to_piece(i) for i in range(tokenizer.vocab_size)]
    assert any("\n" in piece and len(piece) > 1 for piece in pieces)
    assert "▁▁▁▁" in pieces
    assert len(texts[0].encode()) / len(tokenizer.encode(texts[0])) > 1.9


def test_training_is_deterministic(tokenizer, texts):
    assert train_model(texts, 512) == tokenizer.model_bytes


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_bytes_do_not_depend_on_the_cpu_count(texts, monkeypatch, model_type):
    made = set()
    for cpus in (1, 64):
        monkeypatch.setattr(os, "cpu_count", lambda cpus=cpus: cpus)
        made.add(train_model(texts, 400, model_type))
    assert len(made) == 1


def test_text_survives_a_unigram_model(texts):
    unigram = Tokenizer(train_model(texts, 400, "unigram"))
    assert all(unigram.decode(unigram.encode(text)) == text for text in texts[:10])


@pytest.mark.parametrize(("size", "message"), [(100, "too small"), (90_000, "too large")])
def test_vocabularies_that_do_not_fit(texts, size, message):
    with pytest.raises(UserError, match=f"--vocab-size {size} is {message}.*[0-9]+"):
        train_model(texts, size)


def test_samples_take_from_every_file_within_the_limit(tmp_path, texts):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(str(i) * (10_000 if i == 0 else 1_000_000))
    files = find_files([str(tmp_path)]).files
    sample = sample_documents(files, column="text", sample_bytes=910_000)
    assert [(text[0], len(text)) for text in sample] == [
        ("0", 10_000), *((digit, 300_000) for digit in "123"),
    ]  # fmt: skip
    whole = sample_documents(files, column="text", sample_bytes=1 << 22)
    assert sum(map(len, whole)) == 3_010_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.txt", "a.parquet"])
def test_samples_are_spread_over_the_whole_of_each_file(tmp_path, name):
    texts = [f"{i} " + letter * 999 for letter in "abcd" for i in range(1000)]
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), path, compression="none", use_dictionary=False)
    elif name == "a.json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    elif name == "a.txt":
        path.write_text("\n".join(texts))
    else:
        lines = "".join(
            json.dumps({"text": text, "id": str(uuid.uuid4())}) + "\n" for text in texts
        )
        path.write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())
    sample = "".join(
        sample_documents(find_files([str(path)]).files, column="text", sample_bytes=400_000)
    )
    assert 300_000 < len(sample) <= 400_000
    assert all(50_000 < sample.count(letter) < 150_000 for letter in "abcd")


def test_it_trains_only_on_the_training_part(tmp_path, texts, capsys):
    for split, content in (("train", "\n".join(texts)), ("validation", "Ω" * 5000)):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text(content)
    output = tmp_path / "out" / "t.model"
    result = train_tokenizer([str(tmp_path)], output, 400, out=sys.stderr)
    assert result["vocab_size"] == 400
    assert result["hash"] == Tokenizer.load(output).hash
    assert len(Tokenizer.load(output).encode("Ω")) == 2  # two byte pieces: never seen
    assert capsys.readouterr().out == ""
    assert [path.name for path in output.parent.iterdir()] == ["t.model"]


def test_symbols_and_reserved_pieces_are_there_and_no_text_becomes_them(tmp_path, texts):
    (tmp_path / "a.txt").write_text("\n".join(texts))
    files = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "t.model")]
    symbols = ["--symbols", "<|user|>", "<|end|>", "--reserve", "2"]
    assert main(["tokenizer", *files, "--vocab-size", "400", *symbols]) == 0
    tokenizer = Tokenizer.load(tmp_path / "t.model")
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model_bytes)
    marks = ["<|user|>", "<|end|>", "<|reserved_0|>", "<|reserved_1|>"]
    assert processor.vocab_size() == 400
    assert [processor.id_to_piece(i) for i in range(3, 7)] == marks
    assert not {3, 4, 5, 6} & set(tokenizer.encode("".join(marks)))


def test_it_reports_bad_input(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: is"):
        train_tokenizer([str(tmp_path)], tmp_path / "t.model", 400)
    assert not (tmp_path / "t.model").exists()


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, texts, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.txt").write_text("\n".join(texts))
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"--output .*t\.model cannot be written: No space left"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t.model", 400, out=sys.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]

import argparse
import errno
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from cem_jax.data.corpus.files import find_files
from cem_jax.data.corpus.tokenizer_training import sample_documents, train_model
from cem_jax.data.dataset import tokenizer as tokenizer_module
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(shared_tokenizer, text):
    assert shared_tokenizer.decode(shared_tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def shared_tokenizer(tokenizer):
    return tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n",
        "  leading and trailing  ",
        "def f(x):\n\n\tif x:\n\t\treturn '\t'\r\n",
        "nul \0 bell \a del \x7f",
        "▁ literal ▁▁ marks▁",
        "▅ ⁇ \u2047",
        "\ufeffbom",
        "汉字 🚀 é e\u0301 \U0010ffff",
        "He typed <s> and </s> and <unk> and <0x0A>",
    ],
)
def test_text_survives_without_control_ids(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


def test_batches_equal_single_texts(tokenizer, texts):
    batch = [*texts[:20], "a ▁ b", ""]
    assert tokenizer.encode_batch(batch, threads=2) == [tokenizer.encode(t) for t in batch]


def test_newlines_and_indentation_are_learnt(tokenizer, texts):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model_bytes)
    pieces = [processor.id_to_piece(i) for i in range(tokenizer.vocab_size)]
    assert any("\n" in piece and len(piece) > 1 for piece in pieces)
    assert "▁▁▁▁" in pieces
    assert len(texts[0].encode()) / len(tokenizer.encode(texts[0])) > 1.9


def test_piece_ids_and_hash(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 512)
    assert tokenizer.hash == Tokenizer.from_bytes(tokenizer.model_bytes).hash
    assert tokenizer.hash.startswith("sha256:")


def test_training_is_deterministic(tokenizer, texts):
    assert train_model(texts, 512) == tokenizer.model_bytes


def test_unigram_trains_and_survives(texts):
    unigram = Tokenizer(train_model(texts, 400, "unigram"))
    assert all(unigram.decode(unigram.encode(text)) == text for text in texts[:10])


def test_separators(tokenizer):
    assert tokenizer.separator_ids("bos") == ([1], [])
    assert tokenizer.separator_ids("eos") == ([], [2])
    assert tokenizer.separator_ids("both") == ([1], [2])


def test_missing_separator_piece_is_refused_with_a_hint(texts, tmp_path):
    prefix = tmp_path / "no_eos"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(prefix), vocab_size=400, eos_id=-1,
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    tokenizer = Tokenizer.load(f"{prefix}.model")
    assert tokenizer.eos_id is None
    with pytest.raises(UserError, match=r"no eos piece.*--separator bos"):
        tokenizer.separator_ids("both")


def test_lone_surrogates_and_foreign_ids_are_refused(tokenizer):
    with pytest.raises(UserError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(ValueError, match="outside"):
        tokenizer.decode([512])


@pytest.mark.parametrize("content", [b"", b"garbage", b"version https://git-lfs.github.com/x"])
def test_no_model_is_named(tmp_path, content):
    path = tmp_path / "bad.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.model is"):
        Tokenizer.load(path)


def test_missing_model_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.model cannot be read"):
        Tokenizer.load(tmp_path / "nowhere.model")


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


def arguments(**values):
    defaults = {"text_column": "text", "json": True, "vocab_size": 400, "model_type": "bpe",
                "sample_mb": 1}  # fmt: skip
    return argparse.Namespace(**(defaults | values))


def test_command_trains_on_the_training_part_alone(tmp_path, texts, capsys):
    for split, content in (("train", "\n".join(texts)), ("validation", "Ω" * 5000)):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text(content)
    output = tmp_path / "out" / "t.model"
    result = tokenizer_module.run(arguments(input=[str(tmp_path)], output=str(output)))
    assert result["vocab_size"] == 400
    assert result["hash"] == Tokenizer.load(output).hash
    assert len(Tokenizer.load(output).encode("Ω")) == 2  # two byte pieces: never seen
    assert capsys.readouterr().out == ""
    assert [path.name for path in output.parent.iterdir()] == ["t.model"]


def test_command_reports_bad_input(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: is"):
        tokenizer_module.run(arguments(input=[str(tmp_path)], output=str(tmp_path / "t.model")))
    assert not (tmp_path / "t.model").exists()


def test_llama_style_model_as_it_is(shared_data):
    mistral = Tokenizer.load(shared_data / "tokenizers" / "mistral-v1-32k.model")
    assert (mistral.vocab_size, mistral.bos_id, mistral.eos_id) == (32_000, 1, 2)
    assert mistral.encode("Hello world") == [22557, 1526]
    assert mistral.decode([22557, 1526]) == "Hello world"


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch):
    def fill_up(path, content):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_up)
    with pytest.raises(UserError, match="No space left"):
        tokenizer_module._write_atomically(tmp_path / "t.model", b"model")
    assert not list(tmp_path.iterdir())

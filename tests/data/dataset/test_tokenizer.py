import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

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
    assert tokenizer.encode_batch(batch) == [tokenizer.encode(t) for t in batch]


def test_piece_ids_and_hash(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 512)
    assert tokenizer.hash == Tokenizer(tokenizer.model_bytes).hash
    assert tokenizer.hash.startswith("sha256:")


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
def test_a_bad_model_file_is_named(tmp_path, content):
    path = tmp_path / "bad.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.model is"):
        Tokenizer.load(path)


def test_a_missing_model_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.model cannot be read"):
        Tokenizer.load(tmp_path / "nowhere.model")


def test_a_llama_style_model_works_unchanged(shared_data):
    mistral = Tokenizer.load(shared_data / "tokenizers" / "mistral-v1-32k.model")
    assert (mistral.vocab_size, mistral.bos_id, mistral.eos_id) == (32_000, 1, 2)
    assert mistral.encode("Hello world") == [22557, 1526]
    assert mistral.decode([22557, 1526]) == "Hello world"

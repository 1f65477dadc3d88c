import json
from dataclasses import replace

import numpy as np
import pytest
from corpora import all_tokens

from cem_jax.data.dataset.checks import check_dataset, check_token_ids
from cem_jax.data.dataset.store import TokenStream, num_windows, open_dataset
from cem_jax.errors import UserError


def test_reads_across_shards(make_dataset, texts):
    dataset = make_dataset(texts[:10], shard_tokens=97)
    stream = TokenStream(dataset, "train")
    whole = all_tokens(dataset, "train")
    assert len(stream) == len(whole)
    rng = np.random.default_rng(0)
    for start in [0, 96, 97, len(whole), *rng.integers(0, len(whole), 50)]:
        count = int(rng.integers(0, len(whole) - start + 1))
        assert np.array_equal(stream.read(start, count), whole[start : start + count])
    for start, count in ((-1, 2), (len(whole), 1), (0, len(whole) + 1)):
        with pytest.raises(IndexError):
            stream.read(start, count)


def test_windows():
    assert [num_windows(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_the_fingerprint_depends_on_the_contents(make_dataset, texts):
    one, same, other = make_dataset(texts), make_dataset(texts), make_dataset(texts[1:])
    assert one.path != same.path
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert make_dataset(texts, separator="eos").fingerprint != one.fingerprint


def test_missing_things_are_named(tmp_path, make_dataset, texts):
    with pytest.raises(UserError, match="nowhere does not exist"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no dataset\.json"):
        open_dataset(tmp_path)
    dataset = make_dataset(texts[:5])
    with pytest.raises(UserError, match="no split 'test'; it has train"):
        TokenStream(dataset, "test")
    (dataset.path / "tokenizer.model").unlink()
    (dataset.path / "train" / "tokens-00000.npy").unlink()
    with pytest.raises(UserError) as caught:
        open_dataset(dataset.path)
    assert [m.rsplit("/", 1)[1] for m in caught.value.messages] == [
        "tokens-00000.npy is missing", "tokenizer.model is missing",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:-2], "cut short"),
        (lambda raw: raw[:50], "cut short"),
        (lambda raw: b"", "cut short"),
        (lambda raw: raw.replace(b"<u2", b"<u4"), "damaged|holds"),
        (lambda raw: raw.replace(b"<u2", b"<i2"), "int16 values instead of uint16"),
    ],
)
def test_damaged_shards_are_refused(make_dataset, texts, damage, words):
    dataset = make_dataset(texts[:5])
    shard = dataset.path / "train" / "tokens-00000.npy"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(UserError, match=rf"tokens-00000\.npy.*({words})"):
        open_dataset(dataset.path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("tokenizer"),
        lambda d: d["splits"]["train"].pop("shards"),
        lambda d: d["splits"]["train"].update(tokens=1),
        lambda d: d["tokenizer"].update(separator="none"),
        lambda d: d.update(format=99),
        lambda d: d.update(splits=[]),
    ],
)
def test_damaged_descriptions_are_refused(make_dataset, texts, change):
    path = make_dataset(texts[:5]).path / "dataset.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))
    with pytest.raises(UserError, match=r"dataset\.json is damaged"):
        open_dataset(path.parent)
    path.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        open_dataset(path.parent)


def overwrite(dataset, index, value):
    shard = np.load(dataset.path / "train" / "tokens-00000.npy", mmap_mode="r+")
    shard[index] = value
    shard.flush()


def test_check_finds_what_opening_does_not(make_dataset, texts):
    dataset = make_dataset(texts[:5])
    assert check_dataset(dataset.path)["splits"]["train"]["documents"] == 5
    overwrite(dataset, 3, 1)
    open_dataset(dataset.path)
    with pytest.raises(UserError) as caught:
        check_dataset(dataset.path)
    told = " | ".join(caught.value.messages)
    assert "has changed since" in told
    assert "6 separators (id 1) for 5 documents" in told


@pytest.mark.parametrize("separator", ["bos", "eos"])
def test_ids_that_do_not_fit_are_located(make_dataset, texts, tokenizer, separator):
    dataset = make_dataset(texts[:5], separator=separator)
    check_token_ids(dataset)
    first = len(tokenizer.encode(texts[0])) + 1
    overwrite(dataset, first + 4, 512)
    with pytest.raises(UserError) as caught:
        check_token_ids(dataset)
    assert caught.value.messages == (
        f"{dataset.path}/train/tokens-00000.npy, token {first + 4} (document 2): id 512 does not "
        "fit a vocabulary of 512",
    )


def test_another_tokenizer_is_refused_by_hash(make_dataset, texts):
    dataset = make_dataset(texts[:5])
    dataset.require_tokenizer(dataset.tokenizer_hash, "the run")
    with pytest.raises(UserError, match=f"{dataset.tokenizer_hash}, but the run has sha256:f00"):
        dataset.require_tokenizer("sha256:f00", "the run")
    with pytest.raises(UserError, match="sha256:f00"):
        replace(dataset, tokenizer_hash="sha256:f00").load_tokenizer()

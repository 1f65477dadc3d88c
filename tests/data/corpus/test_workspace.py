"""The working directory of `cem prepare`: what it may remove, and what is not a corpus."""

import json
import os
import re
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest
from corpora import files_of, write_jsonl

from cem_jax.data.corpus import encoding
from cem_jax.data.corpus import prepare as prepare_module
from cem_jax.data.corpus.limits import Limits
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.dataset.checks import check_dataset
from cem_jax.data.dataset.mixture import open_mixture, open_source
from cem_jax.data.dataset.store import open_dataset
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import RunFailed, UserError


@pytest.fixture
def corpus(tmp_path, texts):
    folder = tmp_path / "corpus"
    write_jsonl(folder / "a.jsonl", texts)
    return folder


def test_foreign_files_are_never_removed(tmp_path, corpus, model_file):
    for name in ("notes.txt", "train/notes.txt", "deep/er/tokens-00000.npy"):
        mine = tmp_path / "out.partial" / name
        mine.parent.mkdir(parents=True)
        mine.write_text("precious")
        with pytest.raises(UserError, match=f"{re.escape(str(mine))} .* not from `cem prepare`"):
            prepare([str(corpus)], model_file, tmp_path / "out")
        assert mine.read_text() == "precious"
        mine.rename(tmp_path / "saved")
        for folder in mine.parents:
            if folder == tmp_path:
                break
            folder.rmdir()


def test_an_output_that_cannot_be_replaced_is_refused_at_once(tmp_path, corpus, model_file):
    (tmp_path / "real").mkdir()
    for target in ("real", "nowhere"):
        link = tmp_path / f"to-{target}"
        link.symlink_to(tmp_path / target)
        with pytest.raises(UserError, match="is a link: name the directory itself"):
            prepare([str(corpus)], model_file, link)
    with pytest.raises(UserError, match="is a mount point"):
        prepare([str(corpus)], model_file, "/proc")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.endswith(".partial")) == []


def test_the_output_may_be_the_current_directory(tmp_path, corpus, model_file, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    prepare([str(corpus)], model_file, ".", validation_fraction=0.2)
    assert open_dataset(tmp_path / "empty").splits["train"].documents > 0


def test_what_prepare_made_inside_its_input_is_not_corpus(
    tmp_path, corpus, model_file, monkeypatch, capsys
):
    """A killed run continues there, and a finished dataset is skipped with a note."""
    whole = prepare([str(corpus)], model_file, tmp_path / "whole")
    often = Limits(keep_seconds=0.0, batch=2000)
    encode_all = prepare_module.encode_all

    def some(*arguments):
        for number, encoded in enumerate(encode_all(*arguments)):
            if number == 3:
                raise KeyboardInterrupt
            yield encoded

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "encode_all", some)
        prepare([str(corpus)], model_file, corpus / "tokens", limits=often)
    resumed = prepare([str(corpus)], model_file, corpus / "tokens", limits=often)
    assert files_of(corpus / "tokens") == files_of(tmp_path / "whole")
    capsys.readouterr()
    again = prepare([str(corpus)], model_file, tmp_path / "again")
    assert whole["documents"] == resumed["documents"] == again["documents"]
    assert "1 files of other formats ignored: tokens" in capsys.readouterr().err


def test_path_objects_are_accepted(tmp_path, corpus, model_file):
    made = prepare([corpus], model_file, tmp_path / "out", validation_fraction=0.2)
    assert open_source(tmp_path / "out") == open_source(str(tmp_path / "out"))
    assert (
        made["documents"]
        == check_dataset(tmp_path / "out")["splits"]["train"]["documents"]
        + (made["splits"]["validation"]["documents"])
    )


def test_a_pipe_is_not_a_file(tmp_path, corpus, model_file):
    os.mkfifo(corpus / "p.jsonl")
    with pytest.raises(UserError, match=r"p\.jsonl is not a regular file"):
        prepare([str(corpus)], model_file, tmp_path / "out")


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("train", "every file is in a folder that names its split"),
        ("dev", "there is no training split: .*names the validation split"),
    ],
)
def test_a_missing_split_is_explained(tmp_path, texts, model_file, capsys, folder, words):
    write_jsonl(tmp_path / folder / "a.jsonl", texts)
    prepare([str(tmp_path / folder)], model_file, tmp_path / "out", validation_fraction=0.2)
    assert re.search(words, capsys.readouterr().err)


def test_a_changed_description_is_refused(tmp_path, corpus, model_file):
    out = tmp_path / "out"
    prepare([str(corpus)], model_file, out, validation_fraction=0.2)
    description = json.loads((out / "dataset.json").read_text())
    description["splits"]["train"]["bytes"] //= 2
    (out / "dataset.json").write_text(json.dumps(description))
    for use in (open_dataset, check_dataset):
        with pytest.raises(UserError, match="has changed since it was written"):
            use(out)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"format": 1, "splits": {}}', "[]"])
def test_a_damaged_description_is_a_plain_error(tmp_path, corpus, model_file, content):
    out = tmp_path / "out"
    prepare([str(corpus)], model_file, out, validation_fraction=0.2)
    (out / "dataset.json").write_text(content)
    with pytest.raises(UserError, match=r"dataset\.json"):
        open_dataset(out)


@pytest.mark.parametrize("file", ["../out/train/tokens-00000.npy", 5, "/train/tokens-00000.npy"])
def test_shards_must_be_inside_their_dataset(tmp_path, corpus, model_file, file):
    out = tmp_path / "out"
    prepare([str(corpus)], model_file, out, validation_fraction=0.2)
    description = json.loads((out / "dataset.json").read_text())
    description["splits"]["train"]["shards"][0]["file"] = file
    (out / "dataset.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match="is damaged"):
        open_dataset(out)


def test_the_same_data_under_another_name_is_not_a_second_source(tmp_path, corpus, model_file):
    out = tmp_path / "out"
    prepare([str(corpus)], model_file, out, validation_fraction=0.2)
    for other in (f"{out}/../out", f"file://{out}"):
        with pytest.raises(UserError, match="twice"):
            open_mixture([f"{out}=1", f"{other}=1"], cache=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="names no source after the #"):
        open_mixture([f"{out}#=1"])


def test_a_file_and_its_url_are_one(tmp_path, corpus, model_file):
    file = corpus / "a.jsonl"
    once = prepare([str(file)], model_file, tmp_path / "once")
    twice = prepare([str(file), f"file://{file}"], model_file, tmp_path / "twice")
    assert once["documents"] == twice["documents"]


def test_parts_have_the_ids_of_the_whole_next_to_a_literal_space_mark(shared_data):
    tokenizer = Tokenizer.load(shared_data / "tokenizers" / "mistral-v1-32k.model")
    text = ("word \u2581 and\u2581 more " * 400).strip()
    whole = tokenizer.encode_batch([text])[0]
    parts = [i for ids in tokenizer.encode_batch(list(tokenizer.parts([text]))) for i in ids]
    assert list(whole) == list(parts)


def test_a_killed_worker_is_reported_in_one_line():
    result = Future()
    result.set_exception(BrokenProcessPool("gone"))
    with pytest.raises(RunFailed, match="a worker process was killed"):
        encoding._result_of(result)

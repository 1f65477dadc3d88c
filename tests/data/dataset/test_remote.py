"""Corpora and datasets at URLs: read through fsspec, fetched once, checked."""

import gzip
import json
import sys
import threading

import fsspec
import numpy as np
import pytest
from corpora import contents_of, files_of, write_jsonl
from fsspec.registry import _registry

from cem_jax.data.corpus.files import find_files
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.dataset.fetch import fetched
from cem_jax.data.dataset.loader import TrainLoader
from cem_jax.data.dataset.mixture import open_mixture, open_source
from cem_jax.errors import UserError


@pytest.fixture
def memory():
    """Return fsspec's in-memory file system, empty."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def upload(system, folder, root):
    for name, content in files_of(folder).items():
        system.pipe_file(f"{root}/{name}", content)


@pytest.fixture
def corpus(tmp_path, texts):
    write_jsonl(tmp_path / "c" / "train" / "a.jsonl", texts[:20])
    packed = "".join(json.dumps({"text": text}) + "\n" for text in texts[20:30])
    (tmp_path / "c" / "train" / "b.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    write_jsonl(tmp_path / "c" / "validation" / "a.jsonl", texts[30:])
    (tmp_path / "c" / "notes.md").write_text("no corpus")
    return tmp_path / "c"


def test_urls_are_walked_and_globbed_like_folders(memory, corpus):
    upload(memory, corpus, "/bucket/c")
    memory.pipe_file("/bucket/c/train/.hidden/x.txt", b"x")
    found = find_files(["memory://bucket/c"])
    assert {str(file.path): (file.split, file.size) for file in found.files} == {
        f"memory://bucket/c/{name}": (name.split("/")[0], len(content))
        for name, content in files_of(corpus).items()
        if "notes" not in name
    }
    assert [path.name for path in found.ignored] == ["notes.md"]
    globbed = find_files(["memory://bucket/c/*/*.jsonl"]).files
    assert [(file.path.name, file.split) for file in globbed] == [
        ("a.jsonl", "train"), ("a.jsonl", "validation"),
    ]  # fmt: skip
    (alone,) = find_files(["memory://bucket/c/train/b.jsonl.gz"]).files
    assert alone.split == "train"
    with pytest.raises(UserError) as caught:
        find_files(["memory://bucket/no", "memory://bucket/no*", "nonsense://x"])
    for message, words in zip(
        caught.value.messages, ("does not exist", "matches no file", "nonsense"), strict=True
    ):
        assert words in message


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_corpus_at_a_url_gives_the_same_dataset(tmp_path, memory, corpus, model_file, kind):
    upload(memory, corpus, "/bucket/c")
    url = "memory://bucket/c" if kind == "memory" else f"file://{corpus}"
    prepare([str(corpus)], model_file, tmp_path / "local")
    prepare([url], model_file, tmp_path / "remote")
    assert contents_of(tmp_path / "remote") == contents_of(tmp_path / "local")


def test_parquet_at_a_url(tmp_path, memory, texts, model_file):
    import pyarrow as pa
    import pyarrow.parquet as pq

    with memory.open("/bucket/a.parquet", "wb") as file:
        pq.write_table(pa.table({"text": texts}), file)
    result = prepare(["memory://bucket/a.parquet"], model_file, tmp_path / "out")
    assert result["documents"] == len(texts)


def test_faults_of_remote_files_name_the_url(tmp_path, memory, model_file):
    memory.pipe_file("/bucket/a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-5])
    with pytest.raises(UserError, match=r"memory://bucket/a\.jsonl\.gz: is truncated"):
        prepare(["memory://bucket/a.jsonl.gz"], model_file, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("missing", "url", "words"),
    [
        ("gcsfs", "gs://bucket/x", r"gs://bucket/x: .*gcs.*; pip install 'cem_jax\[cloud\]'"),
        ("s3fs", "s3://bucket/x", r"s3://bucket/x: .*s3.*; pip install 'cem_jax\[cloud\]'"),
        ("huggingface_hub", "hf://datasets/x", r"hf://.*; pip install huggingface_hub"),
    ],
)
def test_missing_drivers_are_named(monkeypatch, missing, url, words):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(_registry, url.partition("://")[0], raising=False)
    with pytest.raises(UserError, match=words):
        find_files([url])


@pytest.fixture
def dataset(make_dataset, texts):
    return make_dataset(texts[:20], texts[20:24], shard_tokens=500)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_dataset_at_a_url_is_fetched_once(tmp_path, memory, dataset, kind, monkeypatch):
    upload(memory, dataset.path, "/bucket/sp")
    url = "memory://bucket/sp" if kind == "memory" else f"file://{dataset.path}"
    cache = tmp_path / "cache"
    remote = open_source(url, str(cache))
    assert (remote.name, remote.fingerprint) == (url, dataset.fingerprint)
    assert files_of(remote.path) == files_of(dataset.path)
    one, other = (
        TrainLoader(d, context=8, global_batch=4, seed=0).batch(3) for d in (dataset, remote)
    )
    assert np.array_equal(one["tokens"], other["tokens"])
    monkeypatch.setattr("cem_jax.data.dataset.fetch._fetch_file", None)  # nothing more to fetch
    assert open_source(url, str(cache)).path == remote.path
    assert open_mixture((f"{url}=1",), str(cache)).names == (url,)


def test_another_dataset_at_the_same_url_is_fetched_again(tmp_path, memory, dataset, make_dataset):
    upload(memory, dataset.path, "/bucket/sp")
    first = fetched("memory://bucket/sp", tmp_path / "cache")
    other = make_dataset(["something else"])
    memory.rm("/bucket/sp", recursive=True)
    upload(memory, other.path, "/bucket/sp")
    second = fetched("memory://bucket/sp/", tmp_path / "cache")
    assert first != second
    assert files_of(second) == files_of(other.path)
    assert files_of(first) == files_of(dataset.path)


def test_damage_in_transit_is_detected_and_the_rest_kept(tmp_path, memory, dataset):
    upload(memory, dataset.path, "/bucket/sp")
    good = memory.cat_file("/bucket/sp/train/tokens-00001.npy")
    memory.pipe_file("/bucket/sp/train/tokens-00001.npy", good[:-1] + b"x")
    with pytest.raises(UserError, match=r"tokens-00001\.npy is not the file that .* describes"):
        fetched("memory://bucket/sp", tmp_path / "cache")
    (partial,) = (tmp_path / "cache").glob("*.partial")
    assert (partial / "train" / "tokens-00000.npy").exists()
    with pytest.raises(UserError, match=r"no dataset\.json"):
        open_source(str(partial))
    memory.pipe_file("/bucket/sp/train/tokens-00001.npy", good)
    memory.rm("/bucket/sp/train/tokens-00000.npy")  # fetched before: not needed again
    local = fetched("memory://bucket/sp", tmp_path / "cache")
    assert files_of(local) == files_of(dataset.path)


def test_processes_that_share_a_cache_fetch_once(tmp_path, memory, dataset, monkeypatch):
    import cem_jax.data.dataset.fetch as module

    upload(memory, dataset.path, "/bucket/sp")
    names, fetch_file = [], module._fetch_file
    monkeypatch.setattr(
        module, "_fetch_file", lambda r, t, c: (names.append(r.name), fetch_file(r, t, c))
    )
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(fetched("memory://bucket/sp", tmp_path / "cache"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and len(results) == 4
    assert names.count("tokenizer.model") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"dataset\.json cannot be read"),
        (b"{", r"dataset\.json is damaged"),
        (b'{"tokenizer": {"hash": "x"}, "splits": {"train": {"shards": '
         b'[{"file": "../../etc/passwd", "checksum": "x"}]}}}', "damaged .*passwd"),
    ],
)  # fmt: skip
def test_no_dataset_at_a_url(tmp_path, memory, content, words):
    if content is not None:
        memory.pipe_file("/bucket/sp/dataset.json", content)
    with pytest.raises(UserError, match=f"dataset memory://bucket/sp: .*{words}"):
        fetched("memory://bucket/sp", tmp_path / "cache")

"""Documents by source: each source has its own stream, weight and evaluation."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import all_tokens, contents_of, files_of

from cem_jax.data.corpus.limits import Limits
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.dataset.checks import check_dataset
from cem_jax.data.dataset.loader import TrainLoader, eval_batches
from cem_jax.data.dataset.mixture import open_mixture, open_source, single
from cem_jax.data.dataset.store import open_dataset
from cem_jax.errors import UserError

FIELD = "meta.set"
J = 8


@pytest.fixture
def rows(texts):
    """Return (text, source) pairs of two sources."""
    return [(text, ("Wiki", "C4", "Wiki")[i % 3]) for i, text in enumerate(texts[:30])]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "meta": {"set": source}}) for text, source in rows]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def dataset(tmp_path, rows, model_file):
    write(tmp_path / "c" / "train" / "a.jsonl", rows[:24])
    write(tmp_path / "c" / "validation" / "a.jsonl", rows[24:])
    prepare([str(tmp_path / "c")], model_file, tmp_path / "out", source_field=FIELD)
    return open_dataset(tmp_path / "out")


def expected(tokenizer, rows, source):
    stream = []
    for text, name in rows:
        if name == source:
            stream += [1, *tokenizer.encode(text)]
    return stream


def test_each_source_is_a_stream_in_order(dataset, rows, tokenizer):
    assert dataset.source_names == ("C4", "Wiki")
    for split, own in (("train", rows[:24]), ("validation", rows[24:])):
        whole = []
        for source in ("C4", "Wiki"):
            part = dataset.only(source)
            stream = all_tokens(part, split).tolist()
            assert stream == expected(tokenizer, own, source)
            counts = part.split(split)
            texts = [text for text, name in own if name == source]
            assert (counts.documents, counts.tokens) == (len(texts), len(stream))
            assert counts.bytes == sum(len(text.encode()) for text in texts)
            whole += stream
        assert all_tokens(dataset, split).tolist() == whole
    check_dataset(dataset.path)


def test_without_a_field_the_layout_is_one_stream(tmp_path, rows, model_file):
    write(tmp_path / "a.jsonl", rows)
    prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / "out", validation_fraction=0)
    assert [p.name for p in (tmp_path / "out" / "train").iterdir()] == ["tokens-00000.npy"]
    description = json.loads((tmp_path / "out" / "dataset.json").read_text())["splits"]["train"]
    assert description["sources"] == {
        "all": {key: description[key] for key in ("tokens", "documents", "bytes", "unknown")}
    }
    assert open_dataset(tmp_path / "out").source_names == ()


@pytest.mark.parametrize("nested", [True, False])
def test_parquet_has_the_same_sources(tmp_path, rows, model_file, dataset, nested):
    texts, sources = zip(*rows, strict=True)
    meta = pa.array([{"set": source} for source in sources])
    table = {"text": texts, "meta": meta} if nested else {"text": texts, "meta.set": sources}
    for split, part in (("train", slice(0, 24)), ("validation", slice(24, None))):
        folder = tmp_path / "p" / split
        folder.mkdir(parents=True)
        rows_of = pa.table(table).slice(part.start, (part.stop or 30) - part.start)
        pq.write_table(rows_of, folder / "a.parquet")
    prepare([str(tmp_path / "p")], model_file, tmp_path / "q", source_field=FIELD)
    assert contents_of(tmp_path / "q") == contents_of(dataset.path)


def test_the_number_of_workers_changes_nothing(tmp_path, rows, model_file):
    limits = Limits(batch=2000, small_corpus=0)
    write(tmp_path / "a.jsonl", rows)
    for workers in (1, 2):
        prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / str(workers),
                source_field=FIELD, workers=workers, validation_fraction=0.3,
                limits=limits)  # fmt: skip
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def test_source_names_that_are_not_valid_file_names(tmp_path, model_file):
    names = ["a/b", "a_b", "é ✓", "..", " x ", 7, None, {"no": "name"}]
    rows = [(f"document {i}", name) for i, name in enumerate(names)]
    write(tmp_path / "a.jsonl", rows)
    prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / "out", source_field=FIELD,
            validation_fraction=0)  # fmt: skip
    dataset = open_dataset(tmp_path / "out")
    assert set(dataset.source_names) == {"a/b", "a_b", "é ✓", "..", "x", "7", "unknown"}
    assert dataset.only("unknown").split("train").documents == 2
    files = [shard.file for shard in dataset.splits["train"].shards]
    assert len(set(files)) == 7
    assert all(file.startswith("train/tokens-") and file.isascii() for file in files)
    check_dataset(dataset.path)


def test_a_source_field_that_is_missing_or_has_too_many_values(tmp_path, rows, model_file):
    write(tmp_path / "a.jsonl", rows)
    inputs = [str(tmp_path / "a.jsonl")]
    with pytest.raises(UserError, match=r"a\.jsonl: has no field 'meta\.name' in any record"):
        prepare(inputs, model_file, tmp_path / "out", source_field="meta.name")
    write(tmp_path / "a.jsonl", [(f"text {i}", f"id {i}") for i in range(300)])
    with pytest.raises(UserError, match="more than 256 values"):
        prepare(inputs, model_file, tmp_path / "out", source_field=FIELD)
    assert not list(tmp_path.glob("out*"))


def test_a_mixture_of_the_sources_of_one_dataset(dataset):
    mixture = open_mixture((f"{dataset.path}#Wiki=3", f"{dataset.path}#C4=1"))
    assert mixture.names == (f"{dataset.path}#Wiki", f"{dataset.path}#C4")
    load = TrainLoader(mixture, context=J, global_batch=4, seed=0)
    streams = [all_tokens(dataset.only(name), "train") for name in ("Wiki", "C4")]
    tokens = {name: 0 for name in mixture.names}
    for step in range(40):
        sources, windows = load.windows(step)
        for row, source, window in zip(load.batch(step)["tokens"], sources, windows, strict=True):
            assert np.array_equal(row, streams[source][window * J : window * J + J + 1])
            tokens[mixture.names[source]] += J
        told = load.sources(step + 1)
        assert {name: values["tokens"] for name, values in told.items()} == tokens
    for (name, values), stream in zip(told.items(), streams, strict=True):
        assert values["epoch"] == pytest.approx(tokens[name] / J / ((len(stream) - 1) // J))
    assert tokens[mixture.names[0]] == 3 * tokens[mixture.names[1]]


def test_messages_about_unknown_sources_list_the_known_ones(dataset, make_dataset, texts):
    with pytest.raises(UserError, match="no source 'Books'; it has C4, Wiki"):
        open_source(f"{dataset.path}#Books")
    plain = make_dataset(texts[:5])
    with pytest.raises(UserError, match=r"no source 'x'; it has none.*--source-field"):
        open_mixture((f"{plain.path}#x=1",))
    with pytest.raises(UserError, match="is in the mixture twice"):
        open_mixture((f"{plain.path}=1", f"{plain.path}=2"))


def test_a_split_is_evaluated_source_by_source(dataset):
    """Each stream is read to its end: sources share no windows, and small ones are padded."""
    mixture = single(dataset)
    parts = mixture.parts("validation")
    assert [part.name for part in parts] == [f"{dataset.path}#C4", f"{dataset.path}#Wiki"]
    for part in parts:
        stream = all_tokens(part, "validation")
        for context in (J, len(stream) + 50):
            targets = [
                batch["tokens"][:, 1:][batch["weights"] == 1]
                for batch in eval_batches(part, "validation", context=context, batch=3)
            ]
            assert np.array_equal(np.concatenate(targets), stream[1:])


def test_a_source_without_held_out_documents_is_left_out(tmp_path, rows, model_file):
    write(tmp_path / "c" / "train" / "a.jsonl", rows)
    write(tmp_path / "c" / "validation" / "a.jsonl", [row for row in rows if row[1] == "C4"])
    prepare([str(tmp_path / "c")], model_file, tmp_path / "out", source_field=FIELD)
    mixture = open_mixture((f"{tmp_path}/out#Wiki=1", f"{tmp_path}/out#C4=1"))
    assert [part.source for part in mixture.parts("validation")] == ["C4"]
    with pytest.raises(UserError, match="no split 'tset'"):
        mixture.parts("tset")

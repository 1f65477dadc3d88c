"""The order of training windows over epochs, kills, and changed batch and process counts."""

import numpy as np
import pytest
from corpora import all_tokens, write_jsonl

from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.dataset.loader import TrainLoader
from cem_jax.data.dataset.mixture import open_mixture
from cem_jax.data.dataset.store import open_dataset
from cem_jax.errors import UserError

J = 16
B = 8


@pytest.fixture
def dataset(make_dataset, texts):
    return make_dataset(texts[:8], texts[8:12], shard_tokens=333)


def loader(dataset, **options):
    return TrainLoader(dataset, **({"context": J, "global_batch": B, "seed": 0} | options))


def numbers(load, steps):
    """Return (source, window) of every row, in order."""
    pairs = [np.stack(load.windows(step), axis=1) for step in steps]
    return np.concatenate(pairs).tolist()


def test_held_out_documents_stay_out_in_every_epoch(tmp_path, model_file):
    """With a split chosen by hash and reshuffled epochs, no document is ever on both sides."""
    documents = [f"the {word} document of many words" for word in "abcdefghijklmnopqrst"]
    write_jsonl(tmp_path / "a.jsonl", documents)
    prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / "out", validation_fraction=0.4)
    dataset = open_dataset(tmp_path / "out")
    tokenizer = dataset.load_tokenizer()
    held_out = tokenizer.decode(all_tokens(dataset, "validation"))
    assert 0 < dataset.splits["validation"].documents < len(documents)
    load = loader(dataset, context=4, global_batch=2)
    seen = set()
    for step in range(5 * load.windows_per_epoch // 2):
        seen |= {int(w) for w in load.windows(step)[1]}
    assert seen == set(range(load.windows_per_epoch))
    trained_on = tokenizer.decode(all_tokens(dataset, "train"))
    for document in documents:
        assert (document in trained_on) != (document in held_out)


@pytest.mark.parametrize("stops", [(3, 6, 9), (1,), (18, 19, 60)])
def test_a_run_killed_anywhere_draws_the_same_windows(dataset, stops):
    """Each part has its own loader, as after a restart; epochs continue to count."""
    whole = numbers(loader(dataset), range(100))
    pieces, start = [], 0
    for stop in (*stops, 100):
        load = loader(dataset)
        batches = load.iterate(start)
        for step in range(start, stop):
            expected = loader(dataset).batch(step)["tokens"]
            assert np.array_equal(next(batches)["tokens"], expected)
        batches.close()
        pieces += numbers(load, range(start, stop))
        assert load.epoch(stop) == stop * B / load.windows_per_epoch
        start = stop
    assert pieces == whole
    count = loader(dataset).windows_per_epoch
    for epoch in range(len(whole) // count):
        own = [window for _, window in whole[epoch * count : (epoch + 1) * count]]
        assert sorted(own) == list(range(count))  # none repeated or left out


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 8), (8, 2)])
def test_another_number_of_processes_draws_the_same(dataset, before, after):
    whole = [loader(dataset).batch(step)["tokens"] for step in range(40)]

    def rows(processes, steps):
        share = B // processes
        parts = [loader(dataset, rows=slice(p * share, (p + 1) * share)) for p in range(processes)]
        return [np.concatenate([p.batch(step)["tokens"] for p in parts]) for step in steps]

    resumed = rows(before, range(13)) + rows(after, range(13, 40))
    for got, expected in zip(resumed, whole, strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("batches", [(8, 4, 16), (8, 3, 5), (2, 8)])
@pytest.mark.parametrize("mixed", [False, True])
def test_another_batch_size_continues_at_the_first_window_not_consumed(
    dataset, make_dataset, texts, batches, mixed
):
    data = dataset
    if mixed:
        data = open_mixture((f"{dataset.path}=2", f"{make_dataset(texts[12:30]).path}=1"))
    step = consumed = 0
    drawn = []
    for batch in batches:
        load = loader(data, global_batch=batch).resumed(step, consumed)
        drawn += numbers(load, range(step, step + 7))
        step += 7
        consumed = load.consumed(step)
        assert load.epoch(step) == consumed / load.windows_per_epoch
        told = load.sources(step).values()
        assert sum(values["tokens"] for values in told) == consumed * J
    assert consumed == 7 * sum(batches)
    assert drawn == numbers(loader(data, global_batch=1), range(consumed))


def test_processes_read_their_rows_of_another_batch_size(dataset):
    whole, half = loader(dataset, global_batch=6), loader(dataset, global_batch=6, rows=slice(3, 6))
    whole, half = (load.resumed(5, 5 * B) for load in (whole, half))
    for step in (5, 6, 50):
        assert np.array_equal(half.batch(step)["tokens"], whole.batch(step)["tokens"][3:])


@pytest.mark.parametrize("separator", ["bos", "eos"])
def test_golden_ids_with_separators(tmp_path, model_file, tokenizer, separator):
    """A cache without separators, or with another tokenizer's, would get this wrong."""
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n")
    (tmp_path / "b.txt").write_text("x")
    prepare([str(tmp_path / "*.txt")], model_file, tmp_path / "out", separator=separator,
            validation_fraction=0)  # fmt: skip
    ids = all_tokens(open_dataset(tmp_path / "out"), "train").tolist()
    a, b = tokenizer.encode("def f(x):\n    return x\n"), tokenizer.encode("x")
    assert ids == ([1, *a, 1, *b] if separator == "bos" else [*a, 2, *b, 2])


def test_otherwise_only_the_seed_changes_the_order(dataset):
    one, same, other = (loader(dataset, seed=seed) for seed in (1, 1, 2))
    assert numbers(one, range(20)) == numbers(same, range(20)) != numbers(other, range(20))


def test_fewer_windows_than_a_batch_are_refused_with_the_numbers(make_dataset):
    small = make_dataset(["one two three four five six seven"])
    with pytest.raises(UserError, match=r"dataset has 5 windows of 5 tokens, the batch needs 64"):
        loader(small, context=4, global_batch=64)

import numpy as np
import pytest
from corpora import all_tokens

from cem_jax.data.dataset.loader import TrainLoader, eval_batches
from cem_jax.data.dataset.mixture import open_mixture
from cem_jax.errors import UserError

J = 16


@pytest.fixture
def dataset(make_dataset, texts):
    return make_dataset(texts[:8], texts[8:12], shard_tokens=333)


def loader(dataset, **options):
    return TrainLoader(dataset, **({"context": J, "global_batch": 8, "seed": 0} | options))


def drawn(loader, steps):
    return np.concatenate([loader.windows(step)[1] for step in steps])


def test_batches_are_windows_of_the_stream(dataset):
    stream = all_tokens(dataset, "train")
    load = loader(dataset)
    for step in (0, 5, 1000):
        tokens = load.batch(step)["tokens"]
        assert tokens.shape == (8, J + 1)
        assert tokens.dtype == np.int32
        for row, window in zip(tokens, load.windows(step)[1], strict=True):
            assert np.array_equal(row, stream[window * J : window * J + J + 1])


def test_every_window_is_drawn_once_per_epoch(dataset):
    load = loader(dataset, global_batch=7)
    count = load.windows_per_epoch
    assert count == (len(all_tokens(dataset, "train")) - 1) // J
    assert count % 7
    numbers = drawn(load, range(3 * count // 7 + 1))[: 3 * count].reshape(3, count)
    for epoch in numbers:
        assert np.array_equal(np.sort(epoch), np.arange(count))
    assert not np.array_equal(numbers[0], numbers[1])
    assert load.epoch(count) == 7.0


def test_resuming_anywhere_continues_the_same_order(dataset):
    whole = drawn(loader(dataset), range(300))
    pieces = [drawn(loader(dataset), range(a, b)) for a, b in ((0, 3), (3, 18), (18, 300))]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_the_seed_decides_the_order(dataset):
    assert np.array_equal(drawn(loader(dataset, seed=1), range(9)),
                          drawn(loader(dataset, seed=1), range(9)))  # fmt: skip
    assert not np.array_equal(drawn(loader(dataset, seed=1), range(9)),
                              drawn(loader(dataset, seed=2), range(9)))  # fmt: skip


def test_training_never_sees_held_out_tokens(dataset):
    """Windows index only the training stream, in every epoch."""
    stream = all_tokens(dataset, "train")
    known = {tuple(stream[i * J : i * J + J + 1]) for i in range((len(stream) - 1) // J)}
    load = loader(dataset)
    for step in range(load.windows_per_epoch):  # eight epochs
        assert known.issuperset(map(tuple, load.batch(step)["tokens"]))


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_rows_of_processes_make_the_global_batch(dataset, processes):
    share = 8 // processes
    parts = [loader(dataset, rows=slice(p * share, (p + 1) * share)) for p in range(processes)]
    for step in (0, 77):
        joined = np.concatenate([part.batch(step)["tokens"] for part in parts])
        assert np.array_equal(joined, loader(dataset).batch(step)["tokens"])


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_grain_serves_the_same_batches(dataset, prefetch):
    load = loader(dataset, prefetch=prefetch)
    batches = load.iterate(41)
    for expected in range(41, 60):
        assert np.array_equal(next(batches)["tokens"], load.batch(expected)["tokens"])
    batches.close()


@pytest.mark.parametrize("separator", ["bos", "eos", "both"])
def test_segments_count_documents(make_dataset, separator):
    dataset = make_dataset([f"text {i}" for i in range(60)], separator=separator)
    batch = loader(dataset, document_mask=True, context=48).batch(0)
    assert batch["segments"].dtype == np.int32
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        number = 0
        for i, token in enumerate(tokens):
            started = tokens[i - 1] == 2 if separator == "eos" else token == 1
            if separator == "eos" and i == 0:
                started = False
            number += started
            assert segments[i] == number


def test_mixtures_draw_by_weight_and_by_source_epochs(make_dataset, texts):
    a, b = make_dataset(texts[:8]), make_dataset(texts[8:24])
    load = loader(open_mixture((f"{a.path}=3", f"{b.path}=1")))
    steps = load.windows_per_epoch
    sources = np.concatenate([load.windows(step)[0] for step in range(steps)])
    windows = drawn(load, range(steps))
    assert abs((sources == 0).sum() - 6 * steps) <= 2
    for s, dataset in enumerate((a, b)):
        count = (len(all_tokens(dataset, "train")) - 1) // J
        own = windows[sources == s]
        for start in range(0, len(own) - count, count):
            assert np.array_equal(np.sort(own[start : start + count]), np.arange(count))
    stream = all_tokens(b, "train")
    row = int(np.argmax(load.windows(3)[0] == 1))
    window = load.windows(3)[1][row]
    assert np.array_equal(load.batch(3)["tokens"][row], stream[window * J : window * J + J + 1])


def test_too_little_data_is_reported_with_numbers(make_dataset, texts):
    small = make_dataset(["a b"], ["c"])
    with pytest.raises(UserError, match=r"'train': \d tokens are fewer than one window.*= 17"):
        loader(small)
    with pytest.raises(UserError, match=r"'validation': \d tokens are fewer than one window"):
        eval_batches(small, "validation", context=J, batch=2)
    dataset = make_dataset(texts[:2])
    count = (len(all_tokens(dataset, "train")) - 1) // J
    with pytest.raises(UserError, match=f"has {count} windows of 17 tokens, the batch needs"):
        loader(dataset, global_batch=count + 1)
    loader(dataset, global_batch=count)
    with pytest.raises(UserError, match="no split 'validation'; it has train"):
        eval_batches(dataset, "validation", context=J, batch=2)


def test_ids_outside_the_tokenizer_stop_the_batch(dataset):
    for shard in dataset.splits["train"].shards:
        array = np.load(dataset.path / shard.file, mmap_mode="r+")
        array[:] = 512
        array.flush()
    with pytest.raises(UserError, match=r"tokens-000\d\d\.npy, token \d+: id 512 does not fit"):
        loader(dataset).batch(0)
    batches = loader(dataset).iterate(0)
    with pytest.raises(UserError, match="id 512"):
        next(batches)
    batches.close()


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("context", [5, J, 100])
def test_evaluation_has_every_target_once(dataset, batch, context):
    stream = all_tokens(dataset, "validation")
    inputs, targets = [], []
    for part in eval_batches(dataset, "validation", context=context, batch=batch):
        assert part["tokens"].shape == (batch, context + 1)
        assert part["tokens"].dtype == np.int32
        assert part["weights"].dtype == np.float32
        real = part["weights"] == 1
        assert np.array_equal(real, part["weights"] != 0)
        inputs.append(part["tokens"][:, :-1][real])
        targets.append(part["tokens"][:, 1:][real])
    assert np.array_equal(np.concatenate(targets), stream[1:])
    assert np.array_equal(np.concatenate(inputs), stream[:-1])


def test_evaluation_limit_and_segments(dataset):
    whole = list(eval_batches(dataset, "validation", context=J, batch=2))
    some = list(eval_batches(dataset, "validation", context=J, batch=2, limit=3,
                             document_mask=True))  # fmt: skip
    assert len(some) == 3 < len(whole)
    for full, part in zip(whole, some, strict=False):
        assert np.array_equal(full["tokens"], part["tokens"])
        assert np.array_equal(part["segments"], np.cumsum(part["tokens"] == 1, axis=1))

"""Documents packed into windows under the document mask behave as if alone in a window."""

import jax
import numpy as np
import pytest
from corpora import all_tokens
from model_configs import full_config, model_config, random_parameters

from cem_jax.data.dataset.loader import TrainLoader, eval_batches
from cem_jax.model import pure
from cem_jax.train.loss import sum_of_losses

J = 24


@pytest.fixture
def documents(texts):
    return [text[:k] for k, text in zip((3, 40, 1, 17, 90, 5, 60, 33), texts, strict=False)] * 2


def spans(segments):
    """Return [start, end) of each document within a window."""
    edges = np.flatnonzero(np.diff(segments)) + 1
    return list(zip([0, *edges], [*edges, len(segments)], strict=True))


@pytest.mark.parametrize("separator", ["bos", "eos", "both"])
def test_segments_are_the_documents_of_the_stream(make_dataset, documents, tokenizer, separator):
    """The expected numbers come from the documents, not from separators."""
    dataset = make_dataset(documents, separator=separator)
    before, after = tokenizer.separator_ids(separator)
    owner = []
    for number, text in enumerate(documents):
        owner += [number] * len([*before, *tokenizer.encode(text), *after])
    load = TrainLoader(dataset, context=J, global_batch=4, seed=0, document_mask=True)
    for step in range(6):
        batch = load.batch(step)
        for window, segments in zip(load.windows(step)[1], batch["segments"], strict=True):
            own = np.asarray(owner[window * J : window * J + J + 1])
            assert np.array_equal(np.diff(segments), np.diff(own))


@pytest.mark.parametrize(
    "fields",
    [
        dict(position="alibi", implementation="dense"),
        dict(position="alibi", implementation="blockwise", block_sizes=(8, 8)),
        dict(position="rope"),
        dict(position="none"),
        dict(kind="llama", position="rope", mlp_kind="gated"),
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_packed_and_unpacked_logits_are_equal(make_dataset, documents, fields):
    """Positions restart by themselves: ALiBi and rotations depend on distances alone."""
    make = model_config if fields.get("kind") == "llama" else full_config
    config = make(vocab_size=512, **fields)
    model = pure.bind(config, random_parameters(config, np.float32))
    dataset = make_dataset(documents)
    load = TrainLoader(dataset, context=J, global_batch=3, seed=0, document_mask=True)
    batch = load.batch(0)
    forward = jax.jit(lambda tokens, segments: model(tokens, segments=segments))
    packed = forward(batch["tokens"], batch["segments"])
    assert max(len(spans(segments)) for segments in batch["segments"]) > 2
    for tokens, segments, logits in zip(*batch.values(), packed, strict=True):
        for start, end in spans(segments):
            alone = np.zeros((1, J + 1), np.int32)  # causal: what follows a document is not seen
            alone[0, : end - start] = tokens[start:end]
            expected = forward(alone, np.zeros_like(alone))[0, : end - start]
            np.testing.assert_allclose(logits[start:end], expected, rtol=2e-4, atol=2e-4)


def test_without_the_mask_documents_see_each_other(make_dataset, documents):
    config = full_config(vocab_size=512)
    model = pure.bind(config, random_parameters(config, np.float32))
    load = TrainLoader(
        make_dataset(documents), context=J, global_batch=3, seed=0, document_mask=True
    )
    batch = load.batch(0)
    forward = jax.jit(lambda tokens, segments: model(tokens, segments=segments))
    masked = forward(batch["tokens"], batch["segments"])
    whole = forward(batch["tokens"], np.zeros_like(batch["segments"]))
    assert not np.allclose(masked, whole, atol=1e-2)


def test_the_loss_of_a_packed_split_is_the_sum_over_its_documents(
    make_dataset, documents, tokenizer
):
    """A document's first token is predicted from the document before it."""
    config = full_config(vocab_size=512)
    model = pure.bind(config, random_parameters(config, np.float32))
    dataset = make_dataset(["x"], documents)
    stream = all_tokens(dataset, "validation")
    context = len(stream) - 1  # all in one window
    (batch,) = eval_batches(dataset, "validation", context=context, batch=1, document_mask=True)
    losses = jax.jit(lambda b: sum_of_losses(
        model, b["tokens"], weights=b["weights"], segments=b["segments"]))  # fmt: skip
    found = losses(batch)
    assert float(found.weight) == len(stream) - 1
    forward = jax.jit(model)
    nats = 0.0
    at = 0
    for text in documents:
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        targets = [*ids[1:], *stream[at + len(ids) : at + len(ids) + 1]]
        window = np.zeros((1, len(stream)), np.int32)  # one length, so that it is compiled once
        window[0, : len(ids)] = ids
        logits = np.asarray(forward(window)[0], np.float64)[: len(targets)]
        log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        nats += (log_z - logits[np.arange(len(targets)), targets]).sum()
        at += len(ids)
    assert float(found.nats) == pytest.approx(nats, rel=1e-4)

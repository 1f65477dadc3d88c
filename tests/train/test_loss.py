"""The chunked loss against the plain mean over all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.train import loss


class Readout:
    """A stand-in for a Transformer: looks up states by token, and has a head."""

    def __init__(self, table, head):
        self.table, self.head = table, head

    def hidden(self, tokens, segments, *, dtype):
        x = jnp.take(self.table, tokens, axis=0)
        return x if dtype is None else x.astype(dtype)

    def head_weight(self):
        return self.head


@pytest.fixture
def case(x64):
    return make_case(batch=2, positions=7)


def make_case(batch, positions):
    rng = np.random.default_rng(0)
    vocabulary, dim = 19, 5
    return dict(
        table=jnp.asarray(rng.standard_normal((vocabulary, dim))),
        head=jnp.asarray(rng.standard_normal((vocabulary, dim))),
        tokens=jnp.asarray(rng.integers(0, vocabulary, (batch, positions + 1))),
        weights=jnp.asarray(rng.random((batch, positions))),
    )


@pytest.fixture(params=[1, 6, 1000], ids="rows={}".format)
def chunks(request):
    """Return a chunk size of few rows; by itself, a vocabulary of 19 would fit into one chunk."""
    return loss.ChunkSize(0, request.param)


def mean(table, head, case, *, z_loss=0.0, weights=None, **options):
    losses = loss.sum_of_losses(
        Readout(table, head), case["tokens"], weights=weights, z_loss=z_loss, **options
    )
    return losses.total / losses.weight


def plain_mean(table, head, case, *, z_loss=0.0, weights=None):
    logits = jnp.take(table, case["tokens"][:, :-1], axis=0) @ head.T
    log_z = jax.nn.logsumexp(logits, -1)
    one_hot = jax.nn.one_hot(case["tokens"][:, 1:], len(head), dtype=logits.dtype)
    each = log_z - (logits * one_hot).sum(-1) + z_loss * log_z**2
    return each.mean() if weights is None else (weights * each).sum() / weights.sum()


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients_equal_the_plain_mean(case, chunks, z_loss, weighted):
    arguments = (case["table"], case["head"])
    options = dict(z_loss=z_loss, weights=case["weights"] if weighted else None)
    chunked = lambda *a: mean(*a, case, chunks=chunks, **options)
    ours = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))
    plain = jax.value_and_grad(lambda *a: plain_mean(*a, case, **options), argnums=(0, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14),
        ours(*arguments),
        plain(*arguments),
    )
    value_only = chunked(*arguments)
    np.testing.assert_allclose(value_only, plain(*arguments)[0], rtol=1e-13)


def test_a_window_of_one_target(x64, chunks):
    case = make_case(batch=3, positions=1)
    arguments = (case["table"], case["head"])
    found = mean(*arguments, case, chunks=chunks)
    np.testing.assert_allclose(found, plain_mean(*arguments, case), rtol=1e-13)


def test_the_parts_add_up(case, chunks):
    inputs = Readout(case["table"], case["head"]), case["tokens"]
    both = loss.sum_of_losses(*inputs, z_loss=0.3, chunks=chunks)
    without = loss.sum_of_losses(*inputs, chunks=chunks)
    np.testing.assert_allclose(both.nats, without.total, rtol=1e-12)
    np.testing.assert_allclose(both.nats + both.z, both.total, rtol=1e-12)
    assert without.z == 0
    assert both.weight == case["tokens"][:, 1:].size


def test_targets_of_weight_zero_do_not_count(case, chunks):
    weights = case["weights"].at[:, -1].set(0.0)
    changed = dict(case, tokens=case["tokens"].at[:, -1].add(1) % len(case["head"]))
    how = dict(weights=weights, chunks=chunks)
    total = lambda h, c: loss.sum_of_losses(Readout(case["table"], h), c["tokens"], **how).total
    a, b = (jax.grad(total)(case["head"], c) for c in (case, changed))
    np.testing.assert_array_equal(a, b)


def test_bfloat16_states_keep_a_float32_loss_and_gradient(chunks):
    rng = np.random.default_rng(1)
    table, head = (jnp.asarray(rng.standard_normal((19, 8)), jnp.float32) for _ in range(2))
    case = {"tokens": jnp.asarray(rng.integers(0, 19, (4, 33)))}
    how = dict(dtype=jnp.bfloat16, chunks=chunks)
    value, gradient = jax.value_and_grad(mean, argnums=1)(table, head, case, **how)
    expected, exact = jax.value_and_grad(plain_mean, argnums=1)(table, head, case)
    assert value.dtype == gradient.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=2e-2)
    assert jnp.linalg.norm(gradient - exact) < 2e-2 * jnp.linalg.norm(exact)


def test_an_id_outside_the_vocabulary_gives_nan():
    table, head = jnp.ones((4, 3)), jnp.ones((4, 3))
    assert jnp.isnan(mean(table, head, {"tokens": jnp.array([[0, 1, 4]])}))


def test_no_array_holds_all_logits():
    chunks = loss.ChunkSize(0, 16)
    table, head = jnp.ones((97, 3)), jnp.ones((97, 3))
    tokens = jnp.zeros((4, 33), jnp.int32)
    gradient = jax.jit(jax.grad(lambda h: mean(table, h, {"tokens": tokens}, chunks=chunks)))
    assert gradient.lower(head).compile().memory_analysis().temp_size_in_bytes < 4 * 4 * 32 * 97


def test_chunks_follow_the_devices_that_share_the_rows():
    size = loss.chunk_size()
    one = loss.chunk_length(64, 1024, 32000, size)
    assert one * 64 >= size.rows
    assert loss.chunk_length(64, 1024, 32000, size, shards=8) == 8 * one


@pytest.mark.parametrize("places", [2, 4])
def test_chunks_of_split_positions_take_a_piece_of_each_device(places):
    chunk = loss.chunk_length(3, 24, 7, loss.ChunkSize(0, 2), 4, places)
    assert chunk % places == 0 and chunk < 24
    rng = np.random.default_rng(0)
    x, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 24, 5), (7, 5)))
    targets, weights = jnp.asarray(rng.integers(0, 7, (3, 24))), jnp.ones((3, 24))
    f = lambda c, p: jax.value_and_grad(
        lambda x, h: loss._chunked_losses((0.1, c, p), x, h, targets, weights)[0], (0, 1)
    )(x, head)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        f(chunk, places),
        f(24, 1),
    )
    seen = []
    positions = jnp.broadcast_to(jnp.arange(24)[None], (3, 24))
    loss._over_chunks(lambda c, x: (c, seen.append(x[0].shape)), None, chunk, places, positions)
    assert seen == [(3, chunk)]

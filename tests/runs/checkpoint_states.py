"""A training state to save, and how to compare and save it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cem_jax.runs.position import Position


class TrainState(NamedTuple):
    params: dict
    opt_state: tuple
    step: jax.Array


def make_state(seed=0, width=5):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "blocks": {"query": jax.random.normal(keys[0], (2, 3, width))},
        "head": jax.random.normal(keys[1], (7,)).astype(jnp.bfloat16),
        "scale": jax.random.normal(keys[2], ()),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    return TrainState(params, optimizer.init(params), jnp.int32(seed))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_all(checkpointer, *steps):
    for step in steps:
        checkpointer.save(make_state(step), Position(step, loss=float(step)))
    checkpointer.wait()

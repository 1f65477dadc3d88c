"""Training of the regressors: Adam on the squared error, all seeds at once.

Shapes: E seeds · N points.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cem_jax.model.pure import seeded
from cem_jax.studies.synthetic.data import Data
from cem_jax.studies.synthetic.models import Model, apply, initialise

BATCH = 100
PEAK = 0.005  # learning rate, reached after a twentieth of the steps, then a cosine to 0
_CHUNK = 500  # steps between two reports
_ROWS = 1000  # points to predict at a time


class Fit(NamedTuple):
    """Root mean squared errors, one per seed."""

    train: np.ndarray
    test: np.ndarray


@jax.enable_x64(False)
@jax.threefry_partitionable(True)
def fit(
    model: Model,
    data: Data,
    seeds: int,
    steps: int,
    report: Callable[[int], None] = lambda step: None,
) -> Fit:
    """Train one copy per seed for `steps`, each on its own data (arrays of `data` lead with E).

    `report` is called now and then with the number of steps done.
    """
    keys = jax.vmap(seeded)(jnp.arange(seeds))
    state = _start(model, steps, keys)
    for done in range(0, steps, _CHUNK):
        length = min(_CHUNK, steps - done)
        state = jax.block_until_ready(_advance(model, steps, length, state, keys, data.x, data.y))
        report(done + length)
    parameters = state[0]
    return Fit(
        np.asarray(_errors(model, parameters, data.x, data.y)),
        np.asarray(_errors(model, parameters, data.test_x, data.test_y)),
    )


def _optimizer(steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK, max(1, steps // 20), steps)
    return optax.adam(schedule)


@partial(jax.jit, static_argnums=(0, 1))
def _start(model: Model, steps: int, keys) -> tuple[Any, Any, Any]:
    parameters = jax.vmap(lambda key: initialise(model, key))(keys)
    return parameters, jax.vmap(_optimizer(steps).init)(parameters), jnp.zeros((), jnp.int32)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _advance(model: Model, steps: int, length: int, state, keys, x, y):
    """Make `length` updates. Batches depend on (seed, step): the same for all models."""
    optimizer = _optimizer(steps)
    squared_error = lambda p, x, y: jnp.mean(jnp.square(apply(model, p, x) - y))

    def one_seed(parameters, optimizer_state, key, x, y, first):
        def update(carry, step):
            parameters, optimizer_state = carry
            rows = jax.random.randint(jax.random.fold_in(key, step), (BATCH,), 0, len(x))
            gradient = jax.grad(squared_error)(parameters, x[rows], y[rows])
            change, optimizer_state = optimizer.update(gradient, optimizer_state)
            return (optax.apply_updates(parameters, change), optimizer_state), None

        return jax.lax.scan(update, (parameters, optimizer_state), first + jnp.arange(length))[0]

    parameters, optimizer_state, first = state
    moved = jax.vmap(one_seed, in_axes=(0, 0, 0, 0, 0, None))
    return *moved(parameters, optimizer_state, keys, x, y, first), first + length


@partial(jax.jit, static_argnums=0)
def _errors(model: Model, parameters, x, y):
    def one_seed(p, x, y):
        predicted = jax.lax.map(lambda row: apply(model, p, row[None])[0], x, batch_size=_ROWS)
        return jnp.sqrt(jnp.mean(jnp.square(predicted - y)))

    return jax.vmap(one_seed)(parameters, x, y)

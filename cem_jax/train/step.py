"""One training step as a pure function: loss, gradient, update.

Shapes: B global batch · A accumulated microbatches · J positions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from cem_jax.config import Config
from cem_jax.model import pure
from cem_jax.train.loss import sum_of_losses
from cem_jax.train.optimizer import adamw, learning_rate


class TrainState(NamedTuple):
    """Everything that a run carries from step to step; a checkpoint holds it."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]  # batches consumed, including those of skipped updates
    bad_steps: Int[Array, ""]  # current number of consecutive non-finite steps
    skipped_steps: Int[Array, ""]  # total number of non-finite steps


class StepMetrics(NamedTuple):
    """Scalars of one step; all but the last two are float32."""

    loss: Float[Array, ""]  # mean cross-entropy per target, in nats
    grad_norm: Float[Array, ""]  # before clipping
    learning_rate: Float[Array, ""]
    bad_steps: Int[Array, ""]
    skipped_steps: Int[Array, ""]


# (params, batch, total weight) -> (objective, loss)
LossOf = Callable[[Any, "Batch", Any], tuple[Float[Array, ""], Float[Array, ""]]]
Batch = dict[str, Array]  # tokens [B, J+1]; optionally weights [B, J] and segments [B, J+1]


def initial_state(config: Config) -> TrainState:
    """Return the state of step 0; under jit with output shardings, the same on every mesh."""
    params = pure.initialise(config.model, pure.seeded(config.seed))
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, adamw(config.optimizer, config.model).init(params), zero, zero, zero)


def make_train_step(
    config: Config, total_steps: int, shards: int = 1, ahead: float = 0.0
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Return the step of this configuration, to be jitted with its state donated.

    The loss is the mean over all weighted targets of the global batch, whatever the microbatches. A
    step whose loss or gradient is not finite is counted and leaves parameters and optimizer
    unchanged. `shards`: devices that the batch is spread over. `ahead`: see `learning_rate`.
    """
    optimizer = adamw(config.optimizer, config.model)
    dtype = jnp.dtype(config.train.compute_dtype)

    def loss_of(params, batch: Batch, total_weight):
        losses = sum_of_losses(
            pure.bind(config.model, params),
            batch["tokens"],
            weights=batch.get("weights"),
            segments=batch.get("segments"),
            dtype=dtype,
            z_loss=config.optimizer.z_loss,
            shards=shards,
        )
        return losses.total / total_weight, losses.nats / total_weight

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        loss, grads = accumulate(loss_of, state.params, batch, config.train.accumulation)
        grad_norm = optax.tree.norm(grads)
        eta = learning_rate(state.step, config.optimizer, total_steps, ahead)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - (eta * u).astype(p.dtype), state.params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        bad_steps = jnp.where(finite, 0, state.bad_steps + 1)
        skipped_steps = state.skipped_steps + jnp.where(finite, 0, 1)
        new = TrainState(
            keep(params, state.params),
            keep(opt_state, state.opt_state),
            state.step + 1,
            bad_steps,
            skipped_steps,
        )
        return new, StepMetrics(loss, grad_norm, eta, bad_steps, skipped_steps)

    return step


def accumulate(
    loss_of: LossOf, params: Any, batch: Batch, microbatches: int
) -> tuple[Float[Array, ""], Any]:
    """Return the loss and gradient of the whole batch, computed one microbatch at a time.

    `loss_of(params, part, total_weight)` returns (objective, reported loss), both already divided
    by the weight of the whole batch, so that the parts simply add up.
    """
    total_weight = batch["weights"].sum() if "weights" in batch else _targets(batch)
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    if microbatches == 1:
        (_, loss), grads = gradient(params, batch, total_weight)
        return loss, grads

    def add(carry, part):
        (_, loss), grads = gradient(params, part, total_weight)
        return jax.tree.map(jnp.add, carry, (loss, grads)), None

    # A microbatch consists of rows r, r + A, …: every row stays on its device.
    cut = lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)
    start = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jnp.float32), params))
    return jax.lax.scan(add, start, jax.tree.map(cut, batch))[0]


def _targets(batch: Batch) -> int:
    rows, positions = batch["tokens"].shape
    return rows * (positions - 1)

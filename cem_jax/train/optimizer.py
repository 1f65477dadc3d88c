"""AdamW and its learning-rate schedule, warm-up and cosine decay (Table 2).

`train.step` applies the learning rate, so that the logged value is the one that was used.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from cem_jax.config import ModelConfig, OptimizerConfig
from cem_jax.model import pure


def learning_rate(
    step: Int[Array, ""], config: OptimizerConfig, total_steps: int, ahead: float = 0.0
) -> Float[Array, ""]:
    """Return η at `step` = 0 … total_steps − 1: linear warm-up, then cosine decay.

    `ahead`: steps to shift and lengthen the schedule by, because earlier steps had another batch
    size and the schedule follows the tokens seen.
    """
    length, peak = total_steps + ahead, config.learning_rate
    warmup = max(1, round(config.warmup_fraction * length))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, max(length, warmup + 1), config.final_fraction * peak
    )
    return schedule(step.astype(jnp.float32) + (1.0 + ahead))


def adamw(config: OptimizerConfig, model: ModelConfig) -> optax.GradientTransformation:
    """Return clipping, Adam and decoupled weight decay; scale its updates by −learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(config, model)),
    )


def decay_mask(config: OptimizerConfig, model: ModelConfig) -> Any:
    """Return a tree of booleans: which parameters decay. `matrices` includes embeddings."""
    decays = lambda info: config.decay_mask == "all" or info.decays
    return jax.tree.map(decays, pure.describe(model))

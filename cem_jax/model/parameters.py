"""Parameters as modules declare them: initial values, axis names, and whether they decay.

A parameter's `axes` name its dimensions (`sharding.axes` maps the names to mesh axes); `decays`
says whether weight decay applies: to matrices and embeddings, not to scales, biases and diagonals.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cem_jax.config import AttentionConfig, MLPConfig, ModelConfig
from cem_jax.energy import Preconditioner

Shape = tuple[int, ...]
Axes = tuple[str, ...]

LOW_RANK_STD = 0.02  # initial standard deviation of P's left factor (App. D.4)
INVERSE_SOFTPLUS_OF_1 = math.log(math.e - 1)


def with_values(make: Callable[[], nnx.Module], values: dict[str, Any]) -> Any:
    """Return the module that `make()` returns, with `values` as its parameters.

    `make` is only traced for its structure: nothing is drawn or computed.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state)


def matrix(rngs: nnx.Rngs, shape: Shape, axes: Axes, std: float) -> nnx.Param:
    """Return a weight drawn from N(0, std²), float32."""
    value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, axes=axes, decays=True)


def constant(value: float, shape: Shape, axes: Axes) -> nnx.Param:
    """Return a scale, bias or diagonal filled with `value`, float32."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes, decays=False)


class PreconditionerParameters(nnx.Module):
    """The factors p, left and right of P (Eq. 13, App. D.4): one P per head, or a single one."""

    def __init__(
        self,
        config: AttentionConfig | MLPConfig,
        dim: int,
        heads: int | None,
        rngs: nnx.Rngs,
    ):
        lead, lead_axes = ((), ()) if heads is None else ((heads,), ("heads",))
        shape = (*lead, dim, config.preconditioner_rank)
        axes = (*lead_axes, "embed", "rank")
        low_rank = config.preconditioner == "diagonal_low_rank"
        symmetric = low_rank and config.preconditioner_form == "symmetric"
        # the argument of softplus is p·√D, so that p learns as fast as the other parameters
        self.scale = math.sqrt(dim)
        start = {"paper": 1.0, "identity": INVERSE_SOFTPLUS_OF_1}[config.preconditioner_init]
        self.p = constant(start / self.scale, (*lead, dim), (*lead_axes, "embed"))
        self.left = matrix(rngs, shape, axes, LOW_RANK_STD) if low_rank else None
        self.right = matrix(rngs, shape, axes, 0.0) if symmetric else None

    def factors(self) -> Preconditioner:
        """Return P as an `energy.Preconditioner`."""
        left = None if self.left is None else self.left[...]
        right = None if self.right is None else self.right[...]
        return Preconditioner(self.p[...] * self.scale, left, right)


def preconditioner(
    config: AttentionConfig | MLPConfig, dim: int, heads: int | None, rngs: nnx.Rngs
) -> PreconditionerParameters | None:
    """Return the parameters of the configured P; None if P = I."""
    if config.preconditioner == "none":
        return None
    return PreconditionerParameters(config, dim, heads, rngs)


def step_size(value: float, learned: bool) -> nnx.Param | float:
    """Return η: `value`, or a parameter initialised to it if it is learned."""
    return constant(value, (), ()) if learned else value


def number(step: nnx.Param | float) -> Float[Array, ""] | float:
    """Return the value of η."""
    return step[...] if isinstance(step, nnx.Param) else step


def norm_weight(config: ModelConfig) -> nnx.Param:
    """Return an RMSNorm weight, initialised to 1."""
    return constant(1.0, (config.dim,), ("embed",))

"""What CEM's and Llama's attention share: weights per head, position biases, kernel settings.

Shapes: B batch · J positions · C cache length · N new positions · D model dim · K heads ·
R head dim.
"""

from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from cem_jax.config import ModelConfig
from cem_jax.energy import Rotary, alibi_slopes
from cem_jax.kernels import Options, Scores
from cem_jax.model.parameters import constant, matrix


class Heads:
    """Mixin of the attention sublayers: weights per head, position biases, kernel settings."""

    def _add_heads(self, config: ModelConfig, *weights: str, rngs: nnx.Rngs) -> None:
        """Add [K, R, D] weights with these names, and the learned self bias if configured."""
        c = config.attention
        self.options = Options(
            config.tau, implementation=c.implementation, block_sizes=c.block_sizes
        )
        shape, axes = (c.heads, config.head_dim, config.dim), ("heads", "head_dim", "embed")
        for name in weights:
            setattr(self, name, matrix(rngs, shape, axes, config.init_std))
        self.self_bias = constant(0.0, (c.heads,), ("heads",)) if c.self_bias else None

    def _scores(self, segments: Int[Array, "*B J"] | None = None) -> Scores:
        """Return ALiBi's slopes, the self bias and document ids for the kernels."""
        c = self.settings
        slopes = alibi_slopes(c.heads, c.alibi_slopes) if c.position == "alibi" else None
        bias = None if self.self_bias is None else self.self_bias[...]
        return Scores(slopes=slopes, self_bias=bias, segments=segments)

    def _rotary(self, positions: Int[Array, " J"]) -> Rotary | None:
        c = self.settings
        return Rotary(positions, c.rope_base) if c.position == "rope" else None


def extended(
    cache: Float[Array, "B C *F"], new: Float[Array, "B N *F"], start: Int[Array, ""] | int
) -> Float[Array, "B C *F"]:
    """Return the cache with `new` written at positions `start` to `start` + N − 1."""
    return lax.dynamic_update_slice_in_dim(cache, new, start, axis=1)

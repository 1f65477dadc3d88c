"""The baseline sublayers: Llama's attention and gated MLP, each applied T times.

Shapes: B batch · J positions · C cache length · N new positions · D model dim · K heads ·
R head dim · M MLP dim · T applications.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from cem_jax.config import ModelConfig
from cem_jax.energy import rotate
from cem_jax.energy.activation import activation
from cem_jax.energy.interaction import heads_apart, heads_together
from cem_jax.kernels import Call, attend, attend_cached
from cem_jax.model.heads import Heads, extended
from cem_jax.model.parameters import matrix
from cem_jax.model.sublayer import ReusedSublayer, positions_of
from cem_jax.sharding.linear import project, readout


class Cache(NamedTuple):
    """The decode cache: keys and values of each of the T applications."""

    k: Float[Array, "T B C K R"]
    v: Float[Array, "T B C K R"]


class LlamaAttention(Heads, ReusedSublayer):
    """Llama's attention, x + Σ_k W^O_kᵀ Σ_j α_ijk v_jk, with the configured positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.attention)
        self._add_heads(config, "query", "key", "value", "output", rngs=rngs)

    def branch(
        self, h: Float[Array, "*B J D"], segments: Int[Array, "*B J"] | None = None
    ) -> Float[Array, "*B J D"]:
        """Return the self-attention of h."""
        q, k, v = self._project(h, positions_of(h))
        _, o, _ = attend(Call(q, k, v, scores=self._scores(segments)), self.options)
        return heads_together(o.astype(h.dtype), self.output[...])

    def cache(self, batch: int, length: int, dtype: DTypeLike) -> Cache:
        """Return an empty cache for `length` positions per application."""
        heads, width, _ = self.query[...].shape
        empty = jnp.zeros((self.settings.steps, batch, length, heads, width), dtype)
        return Cache(empty, empty)

    def decode(
        self, x: Float[Array, "B N D"], cache: Cache, start: Int[Array, ""]
    ) -> tuple[Float[Array, "B N D"], Cache]:
        """Return `__call__` of N new positions, the first at `start`, and the updated cache."""

        def apply(x, cache: Cache):
            h = self.context(x)
            q, k, v = self._project(h, positions_of(h, start))
            cache = Cache(extended(cache.k, k, start), extended(cache.v, v, start))
            call = Call(q, cache.k, cache.v, scores=self._scores())
            _, o, _ = attend_cached(call, self.options, start)
            return x + heads_together(o.astype(h.dtype), self.output[...]), cache

        return jax.lax.scan(apply, x, cache)

    def _project(self, h, positions):
        rotary = self._rotary(positions)
        q = rotate(heads_apart(h, self.query[...]), rotary)
        k = rotate(heads_apart(h, self.key[...]), rotary)
        return q, k, heads_apart(h, self.value[...])


class GatedMLP(ReusedSublayer):
    """The gated MLP, x + downᵀ(up h ∘ σ(gate h)) (Eq. 6; Llama's names)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config.mlp
        super().__init__(config, c)
        shape, axes = (c.dim, config.dim), ("mlp", "embed")
        self.gate = matrix(rngs, shape, axes, config.init_std)
        self.up = matrix(rngs, shape, axes, config.init_std)
        self.down = matrix(rngs, shape, axes, config.init_std)

    def branch(self, h: Float[Array, "*B J D"]) -> Float[Array, "*B J D"]:
        """Return the gated MLP of h."""
        gate, up = project(h, self.gate[...]), project(h, self.up[...])
        sigma = activation(self.settings.activation).sigma
        return readout(up * sigma(gate), self.down[...])

"""The baseline sublayers: Llama's attention and gated MLP, and their plain reuse.

Shapes: B batch · J positions · C cache length · N new positions · D model dim · K heads ·
R head dim · M MLP dim · T applications.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from cem_jax.config import ModelConfig
from cem_jax.energy import Rotary, alibi_slopes, rms_norm, rotate
from cem_jax.energy.activation import activation
from cem_jax.energy.interaction import heads_apart, heads_together
from cem_jax.kernels import attend, attend_cached
from cem_jax.model.parameters import constant, matrix
from cem_jax.model.sublayer import ReusedSublayer, positions_of
from cem_jax.sharding.linear import project, readout


class Cache(NamedTuple):
    """Keys and values of each of the T applications."""

    k: Float[Array, "T B C K R"]
    v: Float[Array, "T B C K R"]


class LlamaAttention(ReusedSublayer):
    """x + Σ_k W^O_kᵀ Σ_j α_ijk v_jk, with rotary positions by default."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config.attention
        super().__init__(config, steps=c.steps)
        self.settings = c
        self.tau = config.tau
        shape, axes = (c.heads, config.head_dim, config.dim), ("heads", "head_dim", "embed")
        self.query = matrix(rngs, shape, axes, config.init_std)
        self.key = matrix(rngs, shape, axes, config.init_std)
        self.value = matrix(rngs, shape, axes, config.init_std)
        self.output = matrix(rngs, shape, axes, config.init_std)
        self.self_bias = constant(0.0, (c.heads,), ("heads",)) if c.self_bias else None

    def branch(
        self, h: Float[Array, "*B J D"], segments: Int[Array, "*B J"] | None = None
    ) -> Float[Array, "*B J D"]:
        """Attention of h over itself."""
        c = self.settings
        q, k, v = self._project(h, positions_of(h, None))
        kernel = dict(implementation=c.implementation, block_sizes=c.block_sizes)
        _, o, _ = attend(q, k, v=v, segments=segments, **self._scores(), **kernel)
        return heads_together(o.astype(h.dtype), self.output[...])

    def cache(self, batch: int, length: int, dtype, steps: int | None = None) -> Cache:
        """An empty cache for `length` positions and `steps` applications."""
        heads, width, _ = self.query[...].shape
        empty = jnp.zeros((steps or self.steps, batch, length, heads, width), dtype)
        return Cache(empty, empty)

    def decode(
        self,
        x: Float[Array, "B N D"],
        cache: Cache,
        start: Int[Array, ""],
        steps: int | None = None,
    ) -> tuple[Float[Array, "B N D"], Cache]:
        """`__call__` for N new positions from `start` on; `steps` is the cache's T."""

        def apply(x, cache: Cache):
            h = rms_norm(x, self.norm[...], self.eps)
            q, k, v = self._project(h, positions_of(h, start))
            k = lax.dynamic_update_slice_in_dim(cache.k, k, start, axis=1)
            v = lax.dynamic_update_slice_in_dim(cache.v, v, start, axis=1)
            o, _ = attend_cached(q, k, v=v, start=start, **self._scores())
            return x + heads_together(o.astype(h.dtype), self.output[...]), Cache(k, v)

        return jax.lax.scan(apply, x, cache)

    def _project(self, h, positions):
        c = self.settings
        rotary = Rotary(positions, c.rope_base) if c.position == "rope" else None
        q = rotate(heads_apart(h, self.query[...]), rotary)
        k = rotate(heads_apart(h, self.key[...]), rotary)
        return q, k, heads_apart(h, self.value[...])

    def _scores(self) -> dict:
        c = self.settings
        slopes = alibi_slopes(c.heads, c.alibi_slopes) if c.position == "alibi" else None
        bias = None if self.self_bias is None else self.self_bias[...]
        return dict(tau=self.tau, slopes=slopes, self_bias=bias)


class GatedMLP(ReusedSublayer):
    """x + downᵀ(up h ∘ σ(gate h)) (Eq. 6; Llama's names)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config.mlp
        super().__init__(config, steps=c.steps)
        self.sigma = c.activation
        shape, axes = (c.dim, config.dim), ("mlp", "embed")
        self.gate = matrix(rngs, shape, axes, config.init_std)
        self.up = matrix(rngs, shape, axes, config.init_std)
        self.down = matrix(rngs, shape, axes, config.init_std)

    def branch(self, h: Float[Array, "*B J D"]) -> Float[Array, "*B J D"]:
        """The gated MLP of h."""
        gate, up = project(h, self.gate[...]), project(h, self.up[...])
        return readout(up * activation(self.sigma)(gate), self.down[...])

"""CEM attention: T steps down the interaction energy.

Shapes: B batch · J positions · C cache length · N new positions · D model dim · K heads ·
R head dim.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from cem_jax.config import ModelConfig
from cem_jax.energy.interaction import (
    Keys,
    Weights,
    attention_statistics,
    energy_of_query,
    folded_weights,
    force_on_state,
    keys_of,
    queries_of,
)
from cem_jax.model.heads import Heads, extended
from cem_jax.model.parameters import constant, preconditioner
from cem_jax.model.sublayer import CEMSublayer, positions_of
from cem_jax.sharding.layout import lay_out


class Frame(NamedTuple):
    """What stays fixed over the steps: functions of h and of the weights."""

    keys: Keys
    weights: Weights


class Cache(NamedTuple):
    """The decode cache: keys, which are also the values, and h if there is a diagonal."""

    k: Float[Array, "B C K R"]
    h: Float[Array, "B C D"] | None


class CEMAttention(Heads, CEMSublayer):
    """x + Σ_t η Σ_k P_k(W^Q_kᵀ o_k): attention as gradient steps on ε (Eq. 14, 16)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config.attention
        super().__init__(config, c)
        self._add_heads(config, "query", "key", rngs=rngs)
        self.diagonal = _diagonal(config)
        heads = c.heads if c.preconditioner_heads == "per_head" else None
        self.preconditioner = preconditioner(c, config.dim, heads, rngs)

    def frame(self, h: Float[Array, "*B J D"], segments: Int[Array, "*B J"] | None = None) -> Frame:
        """Return the keys, and the query weight with the preconditioner folded in."""
        keys = keys_of(
            h,
            self.key[...],
            diagonal=self.diagonal is not None,
            scores=self._scores(segments),
            rotary=self._rotary(positions_of(h)),
        )
        # If the mesh splits positions, keys and h are gathered here, once for all T steps; each
        # device computes its own keys first.
        k = lay_out(keys.k, "batch", "sequence", "heads")
        k = lay_out(k, "batch", None, "heads")
        h = None if keys.h is None else lay_out(keys.h, "batch")
        return Frame(keys._replace(k=k, h=h), self._weights())

    def force(self, u: Float[Array, "*B J D"], frame: Frame) -> Float[Array, "*B J D"]:
        """Return F(u) = Σ_k P_k(W^Q_kᵀ o_k [ + d_k ∘ a_k ]) (Eq. 14)."""
        c = self.settings
        return force_on_state(
            u,
            frame.keys,
            frame.weights,
            self.options,
            diagonal_in_update=c.diagonal_in_update,
            update=c.update,
        )

    def energy_at(self, u: Float[Array, "*B J D"], frame: Frame) -> Float[Array, "*B J"]:
        """Return ε(u_i | h_1:i) (Eq. 2, 12)."""
        return energy_of_query(queries_of(u, frame.weights), frame.keys, self.options)

    def statistics(
        self, x: Float[Array, "*B J D"], context: Float[Array, "*B J D"], **inputs: Any
    ) -> dict[str, Float[Array, ""]]:
        """Return attention's `entropy` and `self_mass` at x, averaged over heads and tokens."""
        u, frame = self.normed(x), self.frame(context, **inputs)
        queries = queries_of(u, frame.weights)
        entropy, self_mass = attention_statistics(queries, frame.keys, self.options)
        return {"entropy": entropy, "self_mass": self_mass}

    def cache(self, batch: int, length: int, dtype: DTypeLike) -> Cache:
        """Return an empty cache for `length` positions."""
        heads, width, dim = self.query[...].shape
        h = None if self.diagonal is None else jnp.zeros((batch, length, dim), dtype)
        return Cache(jnp.zeros((batch, length, heads, width), dtype), h)

    def decode(
        self, x: Float[Array, "B N D"], cache: Cache, start: Int[Array, ""]
    ) -> tuple[Float[Array, "B N D"], Cache]:
        """Return `__call__` of N new positions, the first at `start`, and the updated cache."""
        h = self.context(x)
        rotary = self._rotary(positions_of(h, start))
        new = keys_of(h, self.key[...], diagonal=cache.h is not None, rotary=rotary)
        kept_h = None if cache.h is None else extended(cache.h, h, start)
        cache = Cache(extended(cache.k, new.k, start), kept_h)
        keys = Keys(cache.k, cache.h, self._scores(), rotary, start)
        return self._descend(x, h, Frame(keys, self._weights())), cache

    def _weights(self) -> Weights:
        diagonal = None if self.diagonal is None else self.diagonal[...]
        p = None if self.preconditioner is None else self.preconditioner.factors()
        return folded_weights(self.query[...], diagonal, p)


def _diagonal(config: ModelConfig) -> nnx.Param | None:
    c = config.attention
    if c.diagonal == "none":
        return None
    if c.diagonal == "shared":
        return constant(c.diagonal_init, (config.dim,), ("embed",))
    return constant(c.diagonal_init, (c.heads, config.dim), ("heads", "embed"))

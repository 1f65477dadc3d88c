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
from cem_jax.energy import Preconditioner, precondition
from cem_jax.energy.interaction import (
    Context,
    attention_statistics,
    context_of,
    diagonal_coordinates,
    energy_of_query,
    force_on_state,
    heads_apart,
)
from cem_jax.model.heads import Heads, extended
from cem_jax.model.parameters import constant, preconditioner
from cem_jax.model.sublayer import CEMSublayer, positions_of
from cem_jax.sharding.layout import lay_out


class Frame(NamedTuple):
    """What of h and of the weights stays fixed over the steps."""

    context: Context
    folded: Float[Array, "K R D"]  # W^Q_k P_k
    preconditioner: Preconditioner | None


class Cache(NamedTuple):
    """What decoding remembers: keys, which are the values too, and h if there is a diagonal."""

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
        """Return keys, and the query weight with the preconditioner folded in."""
        context = context_of(
            h,
            self.key[...],
            diagonal=self.diagonal is not None,
            rotary=self._rotary(positions_of(h)),
            segments=segments,
            **self._biases(),
        )
        # Where the mesh splits positions, keys and h are gathered here, once for all T steps; keys
        # once each device has made its own.
        k = lay_out(context.k, "batch", "sequence", "heads")
        k = lay_out(k, "batch", None, "heads")
        h = None if context.h is None else lay_out(context.h, "batch")
        return self._frame(context._replace(k=k, h=h))

    def force(self, u: Float[Array, "*B J D"], frame: Frame) -> Float[Array, "*B J D"]:
        """Return F(u) = Σ_k P_k(W^Q_kᵀ o_k [ + d_k ∘ a_k ]) (Eq. 14)."""
        c = self.settings
        return force_on_state(
            u,
            frame.context,
            self.query[...],
            frame.folded,
            self._d(),
            frame.preconditioner,
            exact=c.diagonal_in_update and self.diagonal is not None,
            update=c.update,
            tau=self.tau,
            **self._kernel(),
        )

    def energy_at(self, u: Float[Array, "*B J D"], frame: Frame) -> Float[Array, "*B J"]:
        """Return ε(u_i | h_1:i) (Eq. 2, 12)."""
        q_BJKR, g = self._coordinates(u)
        return energy_of_query(q_BJKR, g, frame.context, tau=self.tau, **self._kernel())

    def statistics(
        self, x: Float[Array, "*B J D"], context: Float[Array, "*B J D"], **inputs: Any
    ) -> dict[str, Float[Array, ""]]:
        """Return the attention's `entropy` and `self_mass` at x, means over heads and tokens."""
        u, frame = self.normed(x), self.frame(context, **inputs)
        q_BJKR, g = self._coordinates(u)
        entropy, self_mass = attention_statistics(
            q_BJKR, g, frame.context, tau=self.tau, **self._kernel()
        )
        return {"entropy": entropy, "self_mass": self_mass}

    def cache(self, batch: int, length: int, dtype: DTypeLike) -> Cache:
        """Return an empty cache for `length` positions."""
        heads, width, dim = self.query[...].shape
        h = None if self.diagonal is None else jnp.zeros((batch, length, dim), dtype)
        return Cache(jnp.zeros((batch, length, heads, width), dtype), h)

    def decode(
        self, x: Float[Array, "B N D"], cache: Cache, start: Int[Array, ""]
    ) -> tuple[Float[Array, "B N D"], Cache]:
        """Return `__call__` for N new positions from `start` on, and the cache with them in it."""
        h = self.context(x)
        rotary = self._rotary(positions_of(h, start))
        new = context_of(h, self.key[...], diagonal=cache.h is not None, rotary=rotary)
        kept_h = None if cache.h is None else extended(cache.h, h, start)
        cache = Cache(extended(cache.k, new.k, start), kept_h)
        context = Context(*cache, rotary=rotary, start=start, **self._biases())
        return self._descend(x, h, self._frame(context)), cache

    def _frame(self, context: Context) -> Frame:
        p = None if self.preconditioner is None else self.preconditioner.factors()
        return Frame(context, precondition(self.query[...], p), p)

    def _coordinates(self, u):
        """(q, g), what of u enters the scores."""
        diagonal = self._d()
        g = None if diagonal is None else diagonal_coordinates(u, diagonal)
        return heads_apart(u, self.query[...]), g

    def _d(self):
        return None if self.diagonal is None else self.diagonal[...]


def _diagonal(config: ModelConfig) -> nnx.Param | None:
    c = config.attention
    if c.diagonal == "none":
        return None
    if c.diagonal == "shared":
        return constant(c.diagonal_init, (config.dim,), ("embed",))
    return constant(c.diagonal_init, (c.heads, config.dim), ("heads", "embed"))

"""Attention of a few new queries over a cache of keys: decoding.

Shapes: B batch · N new positions · C cache length · K heads · R head dim · D model dim.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from cem_jax.kernels.call import accumulator, check_context


def attend_cached(
    q: Float[Array, "B N K R"],
    k: Float[Array, "B C K R"],
    g: Float[Array, "B N D"] | Float[Array, "B N K D"] | None = None,
    h: Float[Array, "B C D"] | None = None,
    *,
    start: Int[Array, ""],
    tau: float,
    slopes: Float[Array, " K"] | None = None,
    self_bias: Float[Array, " K"] | None = None,
    v: Float[Array, "B C K R"] | None = None,
    context: str = "none",
) -> tuple[Array, Array | None]:
    """(o, a) of `kernels.attend` for queries at positions start … start+N−1 of the cache.

    Whatever stands in the cache after a query's own position is not seen. Raises ValueError where
    these positions are not all in the cache, unless `start` is traced: then the caller sees to it.
    """
    new, length = q.shape[1], k.shape[1]
    if not isinstance(start, jax.core.Tracer) and not 0 <= int(start) <= length - new:
        raise ValueError(f"{new} positions from {start} on do not fit a cache of {length}")
    check_context(context)
    dtype = accumulator(q.dtype)
    product = dict(preferred_element_type=dtype)
    s_BKNC = jnp.einsum("bnkr,bckr->bknc", q, k, **product)
    if g is not None:
        subscripts = "bnkd,bcd->bknc" if g.ndim == q.ndim else "bnd,bcd->bnc"
        diagonal = jnp.einsum(subscripts, g, h, **product)
        s_BKNC += diagonal if g.ndim == q.ndim else diagonal[:, None]
    s_BKNC /= tau
    i = start + jnp.arange(q.shape[1])
    distance_NC = i[:, None] - lax.iota(jnp.int32, k.shape[1])[None, :]
    if slopes is not None:
        s_BKNC -= (slopes.astype(dtype)[:, None, None] * distance_NC[None])[None]
    if self_bias is not None:
        beta_K11 = self_bias.astype(dtype)[:, None, None]
        s_BKNC += jnp.where(distance_NC[None] == 0, beta_K11, 0.0)[None]
    s_BKNC = jnp.where((distance_NC >= 0)[None, None], s_BKNC, -jnp.inf)
    weight_BKNC = jnp.exp(s_BKNC - s_BKNC.max(-1, keepdims=True))
    p_BKNC = (weight_BKNC / weight_BKNC.sum(-1, keepdims=True)).astype(q.dtype)
    o_BNKR = jnp.einsum("bknc,bckr->bnkr", p_BKNC, k if v is None else v, **product)
    a = None
    if context == "summed":
        a = jnp.einsum("bknc,bcd->bnd", p_BKNC, h, **product)
    elif context == "per_head":  # heads first, as in `dense.attend`
        a = jnp.swapaxes(jnp.einsum("bknc,bcd->bknd", p_BKNC, h, **product), 1, 2)
    return o_BNKR, a

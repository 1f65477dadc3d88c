"""The log-partition function with all scores materialized: O(J²) memory, the reference for tests.

JAX derives all derivatives, of any order.

Shapes: B leading axes · J positions of queries (i) · C of keys (j), J unless decoding · K heads ·
R head dim · D model dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cem_jax.kernels.call import Call, Options, Outputs, accumulator, in_front, visible


def scores(
    call: Call, options: Options, start: Int[Array, ""] | int = 0
) -> Float[Array, "*B K J C"]:
    """Return s_ijk of `call.Scores`, −∞ for hidden j. The first query is at position `start`."""
    q, k, _, g, h, terms = call
    product = dict(preferred_element_type=accumulator(q.dtype))
    s_BKJC = jnp.einsum("...ikr,...jkr->...kij", q, k, **product)
    if call.per_head:
        s_BKJC += jnp.einsum("...ikd,...jd->...kij", g, h, **product)
    elif g is not None:
        s_BKJC += jnp.einsum("...id,...jd->...ij", g, h, **product)[..., None, :, :]
    s_BKJC /= options.tau
    i, j = start + jnp.arange(q.shape[-3]), jnp.arange(k.shape[-3])
    distance_JC = i[:, None] - j[None, :]
    seen = visible(distance_JC, terms.segments, terms.segments)
    s_BKJC += in_front(terms.bias(distance_JC, s_BKJC.dtype), s_BKJC.ndim)
    return jnp.where(in_front(seen, s_BKJC.ndim), s_BKJC, -jnp.inf)


def log_partition(call: Call, options: Options) -> Float[Array, "*B K J"]:
    """Return lse_ik = log Σ_j exp s_ijk."""
    return jax.nn.logsumexp(scores(call, options), axis=-1)


def attend(call: Call, options: Options, start: Int[Array, ""] | int = 0) -> Outputs:
    """Return the outputs of `kernels.attend`, with the probabilities materialized."""
    s_BKJC = scores(call, options, start)
    lse_BKJ = jax.nn.logsumexp(s_BKJC, axis=-1)
    p_BKJC = jnp.exp(s_BKJC - lse_BKJ[..., None]).astype(call.q.dtype)
    product = dict(preferred_element_type=s_BKJC.dtype)
    values = call.k if call.v is None else call.v
    o_BJKR = jnp.einsum("...kij,...jkr->...ikr", p_BKJC, values, **product)
    a = None
    if options.average == "summed":
        a = jnp.einsum("...kij,...jd->...id", p_BKJC, call.h, **product)
    elif options.average == "per_head":
        # heads first: XLA on CPU cannot write a bfloat16 product's float32 sums in another order
        a = jnp.swapaxes(jnp.einsum("...kij,...jd->...kid", p_BKJC, call.h, **product), -3, -2)
    return Outputs(lse_BKJ, o_BJKR, a)


def attend_cached(call: Call, options: Options, start: Int[Array, ""] | int) -> Outputs:
    """Return `attend` for N new queries at positions start … start+N−1 of a cache: decoding.

    q and g have the N new positions; k, h and v those of the cache. A query does not see what the
    cache holds after its own position. Raises ValueError if these positions are not all in the
    cache, unless `start` is traced: then the caller must ensure it.
    """
    new, length = call.q.shape[1], call.k.shape[1]
    if not isinstance(start, jax.core.Tracer) and not 0 <= int(start) <= length - new:
        raise ValueError(f"{new} positions from {start} on do not fit a cache of {length}")
    return attend(call, options, start)

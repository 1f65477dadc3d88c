"""RMSNorm, and a force carried back through it.

Shapes: B leading axes · D model dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*B D"]:
    """x / √(mean(x²) + eps) ∘ weight (no weight: 1), in float32 or better, in the dtype of `x`."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    wide = x.astype(dtype)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    normed = wide * scale
    if weight is not None:
        normed *= jnp.expand_dims(weight.astype(dtype), range(x.ndim - 1))
    return normed.astype(x.dtype)


def force_at_state(
    force: Float[Array, "*B D"],
    x: Float[Array, "*B D"],
    weight: Float[Array, " D"] | None,
    eps: float,
    norm_gradient: str,
) -> Float[Array, "*B D"]:
    """The force on x of an energy whose force at u = RMSNorm(x) is `force`.

    at_u: the same (the paper's). scaled: weight ∘ force, restoring descent for learned weights.
    full: (∂u/∂x)ᵀ force, the exact chain rule.
    """
    if norm_gradient == "at_u":
        return force
    if norm_gradient == "scaled":
        if weight is None:
            return force
        return force * jnp.expand_dims(weight.astype(force.dtype), range(force.ndim - 1))
    if norm_gradient == "full":
        return jax.vjp(lambda x: rms_norm(x, weight, eps), x)[1](force)[0]
    raise ValueError(f"norm_gradient must be at_u, scaled or full; got {norm_gradient!r}")

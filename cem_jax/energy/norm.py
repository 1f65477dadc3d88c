"""RMSNorm, and how a force at the normalised state acts on the state.

Shapes: B leading axes · D model dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class StepNorm(NamedTuple):
    """The norm inside the recursion."""

    weight: Float[Array, " D"] | None  # None: no learned weight
    eps: float
    gradient: str = "at_u"  # at_u | scaled | full: see `force_at_state`


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*B D"]:
    """Return x / √(mean(x²) + eps) ∘ weight, in the dtype of `x`, computed in float32 or better."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    wide = x.astype(dtype)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    normed = wide * scale
    if weight is not None:
        normed *= jnp.expand_dims(weight.astype(dtype), range(x.ndim - 1))
    return normed.astype(x.dtype)


def at_state(
    force: Callable[[Float[Array, "*B D"]], Float[Array, "*B D"]], norm: StepNorm | None
) -> Callable[[Float[Array, "*B D"]], Float[Array, "*B D"]]:
    """Return the force as a function of x, given it as a function of u = RMSNorm(x).

    `norm` None: u = x.
    """
    if norm is None:
        return force
    return lambda x: force_at_state(force(rms_norm(x, norm.weight, norm.eps)), x, norm)


def force_at_state(
    force: Float[Array, "*B D"], x: Float[Array, "*B D"], norm: StepNorm
) -> Float[Array, "*B D"]:
    """Return the force that acts on x, given the force at u = RMSNorm(x).

    `norm.gradient` at_u: the same force, as in the paper; scaled: weight ∘ force, which restores
    descent with learned weights; full: (∂u/∂x)ᵀ force, the exact chain rule. Raises ValueError for
    any other value.
    """
    if norm.gradient == "at_u":
        return force
    if norm.gradient == "scaled":
        if norm.weight is None:
            return force
        return force * jnp.expand_dims(norm.weight.astype(force.dtype), range(force.ndim - 1))
    if norm.gradient == "full":
        return jax.vjp(lambda x: rms_norm(x, norm.weight, norm.eps), x)[1](force)[0]
    raise ValueError(f"norm_gradient must be at_u, scaled or full; got {norm.gradient!r}")

"""The element-wise energy ξ (Eq. 7–8, 15), whose force is a gated MLP.

    ξ(u_i | h_i) = −γ_i · φ(tied u_i)              γ_i = multiplier h_i, fixed over the steps
    F_i = P tiedᵀ ( γ_i ∘ σ(tied u_i) )            φ' = σ

A layer works in the hidden coordinates z = tied u: the force there is −∂ξ/∂z = γ ∘ σ(z), and
P tiedᵀ, folded into one weight, maps it back to the residual stream.

Shapes: B leading axes · J positions · D model dim · M MLP dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from cem_jax.energy.activation import activation as activation_by_name
from cem_jax.energy.activation import antiderivative
from cem_jax.energy.arrays import same_dtype
from cem_jax.sharding.linear import project, readout


def elementwise_energy(
    u: Float[Array, "*B J D"],
    gamma: Float[Array, "*B J M"],
    tied: Float[Array, "M D"],
    *,
    activation: str = "silu",
) -> Float[Array, "*B J"]:
    """Return ξ(u_i | h_i) = −γ_i·φ(tied u_i) (Eq. 7), in float32 or better.

    Raises ValueError if shapes do not fit together.
    """
    u, gamma, tied = _fitting(*same_dtype(u, gamma, tied))
    return hidden_energy(project(u, tied), gamma, activation=activation)


def elementwise_force(
    u: Float[Array, "*B J D"],
    gamma: Float[Array, "*B J M"],
    tied: Float[Array, "M D"],
    *,
    activation: str = "silu",
    preconditioner: Float[Array, "D D"] | None = None,
) -> Float[Array, "*B J D"]:
    """Return F_i = P tiedᵀ(γ_i ∘ σ(tied u_i)) (Eq. 15), in closed form; without P, −∂ξ/∂u (Eq. 8).

    Raises ValueError if shapes do not fit together.
    """
    u, gamma, tied = _fitting(*same_dtype(u, gamma, tied))
    force = readout(hidden_force(project(u, tied), gamma, activation=activation), tied)
    return force if preconditioner is None else project(force, jnp.asarray(preconditioner))


def _fitting(u, gamma, tied):
    """Return the arrays as they are; raise ValueError if their shapes do not fit together."""
    if u.ndim < 1 or tied.ndim != 2 or tied.shape[-1] != u.shape[-1]:
        raise ValueError(f"tied must be [M, D] for u [..., D]; got {tied.shape} and {u.shape}")
    if gamma.shape != (*u.shape[:-1], tied.shape[0]):
        raise ValueError(
            f"gamma must be [..., M] = {(*u.shape[:-1], tied.shape[0])}; got {gamma.shape}"
        )
    return u, gamma, tied


def hidden_energy(
    z: Float[Array, "*B J M"], gamma: Float[Array, "*B J M"], *, activation: str
) -> Float[Array, "*B J"]:
    """Return ξ in hidden coordinates, −γ·φ(z), summed in float32 or better."""
    dtype = jnp.promote_types(z.dtype, jnp.float32)
    return -jnp.sum(gamma.astype(dtype) * antiderivative(activation)(z.astype(dtype)), axis=-1)


def hidden_force(
    z: Float[Array, "*B J M"],
    gamma: Float[Array, "*B J M"],
    *,
    activation: str,
    update: str = "closed_form",
) -> Float[Array, "*B J M"]:
    """Return −∂ξ/∂z = γ ∘ σ(z), in the dtype of `z`; update="autodiff" uses `jax.grad` of ξ."""
    if update == "autodiff":
        return -jax.grad(lambda z: hidden_energy(z, gamma, activation=activation).sum())(z)
    dtype = jnp.promote_types(z.dtype, jnp.float32)
    sigma = activation_by_name(activation).sigma
    return (gamma.astype(dtype) * sigma(z.astype(dtype))).astype(z.dtype)

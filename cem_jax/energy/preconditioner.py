"""Learned preconditioners P (Eq. 13): a positive diagonal plus a symmetric matrix of low rank.

    P = diag(softplus(diagonal)) + left·rightᵀ + right·leftᵀ         or, in psd form,
    P = diag(softplus(diagonal)) + left·leftᵀ

P is linear and fixed over the T steps, so a layer folds it once per forward pass into the weight W
whose rows are read out: W P. After that P costs nothing per token.

Shapes: D model · F rows of a weight · S rank · H leading axes, such as heads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from cem_jax.energy.arrays import same_dtype

_HALVINGS = 30  # bisection steps per eigenvalue: to the last digits of float32


class Preconditioner(NamedTuple):
    """P as its factors."""

    diagonal: Float[Array, "*H D"]  # argument of softplus
    left: Float[Array, "*H D S"] | None = None  # None: P is diagonal
    right: Float[Array, "*H D S"] | None = None  # None: psd form


def precondition(x: Float[Array, "*N F D"], p: Preconditioner | None) -> Float[Array, "*N F D"]:
    """Return x P (P is symmetric), in the dtype of `x`: for vectors, or to fold P into a weight.

    A P per head needs rows with a leading head axis, [K, F, D].
    """
    if p is None:
        return x
    like_x = lambda f: jnp.expand_dims(f.astype(x.dtype), range(x.ndim - f.ndim))
    result = x * like_x(jax.nn.softplus(p.diagonal)[..., None, :])
    if p.left is None:
        return result
    left = like_x(p.left)
    if p.right is None:
        return result + (x @ left) @ jnp.matrix_transpose(left)
    right = like_x(p.right)
    result += (x @ left) @ jnp.matrix_transpose(right)
    return result + (x @ right) @ jnp.matrix_transpose(left)


def preconditioner_matrix(
    diagonal: Float[Array, "*H D"],
    left: Float[Array, "*H D S"] | None = None,
    right: Float[Array, "*H D S"] | None = None,
) -> Float[Array, "*H D D"]:
    """Return P as a matrix (Eq. 13); `right` None: the psd form, `left` None: a diagonal P.

    Raises ValueError if shapes do not fit together.
    """
    diagonal, left, right = same_dtype(diagonal, left, right)
    matrix = jax.nn.softplus(diagonal)[..., None] * jnp.expand_dims(
        jnp.eye(diagonal.shape[-1], dtype=diagonal.dtype), range(diagonal.ndim - 1)
    )
    if left is None:
        return matrix
    right_shape = left.shape if right is None else right.shape
    if left.shape[:-1] != diagonal.shape or right_shape != left.shape:
        raise ValueError(
            f"left and right must be [..., D, S] for a diagonal of shape {diagonal.shape}; "
            f"got {left.shape} and {right_shape}"
        )
    product = left @ jnp.matrix_transpose(left if right is None else right)
    return matrix + (product if right is None else product + jnp.matrix_transpose(product))


def extreme_eigenvalues(p: Preconditioner) -> tuple[Float[Array, "*H"], Float[Array, "*H"]]:
    """Return the smallest and the largest eigenvalue of P, without building P.

    Bisects on the number of eigenvalues below λ, which Sylvester's law of inertia gives from a
    matrix of the size of the rank: for P = Δ + U C Uᵀ with C = C⁻¹ and Δ − λ regular,

        #(P < λ) = #(Δ < λ) + #(C + Uᵀ(Δ − λ)⁻¹U > 0) − #(C > 0).

    The error is about 1e-6 ‖P‖ in float32.
    """
    if p.left is not None and p.diagonal.ndim > 1:
        return jax.vmap(extreme_eigenvalues)(p)
    delta_D = jax.nn.softplus(p.diagonal)
    lowest, highest = delta_D.min(-1), delta_D.max(-1)
    if p.left is None:
        return lowest, highest
    rank = p.left.shape[-1]
    if p.right is None:
        u_DS, c_SS = p.left, jnp.eye(rank, dtype=p.left.dtype)
    else:
        u_DS = jnp.concatenate([p.left, p.right], axis=-1)
        c_SS = jnp.roll(jnp.eye(2 * rank, dtype=p.left.dtype), rank, axis=0)

    least = jnp.finfo(delta_D.dtype).eps * highest  # keeps Δ − λ regular
    reach = jnp.sum(jnp.square(u_DS))  # ≥ ‖U C Uᵀ‖

    def below(bound):
        """Return the number of eigenvalues smaller than `bound`."""
        apart_D = delta_D - bound
        apart_D = jnp.where(jnp.abs(apart_D) < least, least, apart_D)
        small_SS = c_SS + (u_DS / apart_D[:, None]).T @ u_DS
        return (apart_D < 0).sum() + (jnp.linalg.eigvalsh(small_SS) > 0).sum() - rank

    def bisect(count):
        """Return the `count`-th smallest eigenvalue: where `below` reaches `count`."""

        def halve(bounds, _):
            low, high = bounds
            middle = (low + high) / 2
            enough = below(middle) >= count
            return (jnp.where(enough, low, middle), jnp.where(enough, middle, high)), None

        start = (lowest - reach, highest + reach)
        low, high = jax.lax.scan(halve, start, length=_HALVINGS)[0]
        return (low + high) / 2

    return bisect(1), bisect(delta_D.shape[-1])

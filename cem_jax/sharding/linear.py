"""Products with weights stored as rows, `weight_FD`: from D to F coordinates and back.

A tied layer uses one weight in both directions. Nothing is flattened: batch and sequence axes stay
separate, so either can be sharded.

Shapes: N any leading axes · D model · F features of the projection.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from cem_jax.sharding.layout import whole_rows


def project(x: Float[Array, "*N D"], weight: Float[Array, "F D"]) -> Float[Array, "*N F"]:
    """Compute y_f = Σ_d weight_fd x_d, in the dtype of `x`."""
    return _project(x, whole_rows(weight.astype(x.dtype)))


def readout(y: Float[Array, "*N F"], weight: Float[Array, "F D"]) -> Float[Array, "*N D"]:
    """Compute x_d = Σ_f weight_fd y_f, the transpose of `project`, in the dtype of `y`."""
    return _readout(y, whole_rows(weight.astype(y.dtype)))


def _into(x, weight):
    return jnp.einsum("...d,fd->...f", x, weight)


def _out_of(y, weight):
    return jnp.einsum("...f,fd->...d", y, weight)


def weight_gradient(
    x: Float[Array, "*N D"], y: Float[Array, "*N F"], dtype: DTypeLike | None = None
) -> Float[Array, "F D"]:
    """Compute Σ_n y_nf x_nd, the gradient of a weight between x and y, in `dtype` (default: x's).

    XLA on CPU would transpose y, the wide operand, and recompute it to do so, which
    takes half of an MLP's time. Here x and the small result are transposed instead.
    """
    leading = tuple(range(x.ndim - 1))
    product = lambda a, b: lax.dot_general(
        a, b, ((leading, leading), ((), ())), preferred_element_type=dtype
    )
    return lax.platform_dependent(
        x,
        y,
        cpu=lambda x, y: lax.optimization_barrier(product(x, y)).T,
        default=lambda x, y: product(y, x),
    )


@jax.custom_vjp
def _project(x, weight):
    return _into(x, weight)


@jax.custom_vjp
def _readout(y, weight):
    return _out_of(y, weight)


_project.defvjp(
    lambda x, weight: (_project(x, weight), (x, weight)),
    lambda kept, bar: (_readout(bar, kept[1]), weight_gradient(kept[0], bar)),
)
_readout.defvjp(
    lambda y, weight: (_readout(y, weight), (y, weight)),
    lambda kept, bar: (_project(bar, kept[1]), weight_gradient(bar, kept[0])),
)

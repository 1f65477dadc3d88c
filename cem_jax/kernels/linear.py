"""Products with weights stored as rows, `weight_FD`: into its F coordinates and back out of them.

A tied layer uses one weight both ways, so the pair is one subject. Nothing is flattened: batch and
sequence axes stay apart, which lets either be sharded.

Shapes: N any leading axes · D model · F features of the projection.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def project(x: Float[Array, "*N D"], weight: Float[Array, "F D"]) -> Float[Array, "*N F"]:
    """y_f = Σ_d weight_fd x_d, in the dtype of `x`."""
    return jnp.einsum("...d,fd->...f", x, weight.astype(x.dtype))


def readout(y: Float[Array, "*N F"], weight: Float[Array, "F D"]) -> Float[Array, "*N D"]:
    """x_d = Σ_f weight_fd y_f, the transpose of `project`, in the dtype of `y`."""
    return _readout(y, weight.astype(y.dtype))


# Left to autodiff, the weight's gradient becomes a product with a transposed result; XLA on CPU
# runs that up to five times slower, and in bfloat16 with ten times the rounding error.
@jax.custom_vjp
def _readout(y, weight):
    return jnp.einsum("...f,fd->...d", y, weight)


def _readout_forward(y, weight):
    return _readout(y, weight), (y, weight)


def _readout_backward(residuals, x_bar):
    y, weight = residuals
    leading = tuple(range(y.ndim - 1))
    weight_bar = lax.dot_general(y, x_bar, ((leading, leading), ((), ())))
    return project(x_bar, weight), weight_bar


_readout.defvjp(_readout_forward, _readout_backward)

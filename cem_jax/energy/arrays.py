"""Conversion of callers' array-likes, of any float dtype, to arrays of one dtype."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float


def same_dtype(*arrays: ArrayLike | None) -> tuple[Float[Array, "..."] | None, ...]:
    """Return the arrays in the floating dtype that they promote to; None stays None."""
    arrays = [None if a is None else jnp.asarray(a) for a in arrays]
    dtype = jnp.result_type(*(a for a in arrays if a is not None))
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(float)
    return tuple(None if a is None else a.astype(dtype) for a in arrays)

"""What callers may hand in: array-likes of any float dtype."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float


def same_dtype(*arrays: ArrayLike | None) -> tuple[Float[Array, "..."] | None, ...]:
    """Return the arrays (None stays None) in the dtype they promote to, a floating one."""
    arrays = [None if a is None else jnp.asarray(a) for a in arrays]
    dtype = jnp.result_type(*(a for a in arrays if a is not None))
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(float)
    return tuple(None if a is None else a.astype(dtype) for a in arrays)

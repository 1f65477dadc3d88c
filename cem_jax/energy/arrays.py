"""What callers may hand in: array-likes of any float dtype."""

import jax
import jax.numpy as jnp


def same_dtype(*arrays) -> tuple[jax.Array | None, ...]:
    """The arrays (None stays None) in the dtype they promote to, a floating one."""
    arrays = [None if a is None else jnp.asarray(a) for a in arrays]
    dtype = jnp.result_type(*(a for a in arrays if a is not None))
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(float)
    return tuple(None if a is None else a.astype(dtype) for a in arrays)

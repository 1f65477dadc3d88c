"""The log-partition function with every score written out: O(J²) memory, the oracle of the others.

Derivatives, of any order, are JAX's own.

Shapes: B leading axes · J positions (i query, j key) · K heads · R head dim · D model dim.
"""

import jax
import jax.numpy as jnp

from cem_jax.kernels.call import Inputs, accumulator


def scores(inputs: Inputs, tau: float) -> jax.Array:
    """s_ijk = (k_jk·q_ik + g_i·h_j)/τ − m_k(i−j) + β_k[i=j], −∞ for hidden j. [..., K, J, J]."""
    q, k, _, g, h, slopes, self_bias, segments = inputs
    dtype = accumulator(q.dtype)
    product = dict(preferred_element_type=dtype)
    s_BKIJ = jnp.einsum("...ikr,...jkr->...kij", q, k, **product)
    if g is not None:
        per_head = g.ndim == q.ndim
        diagonal = jnp.einsum(
            "...ikd,...jd->...kij" if per_head else "...id,...jd->...ij", g, h, **product
        )
        s_BKIJ += diagonal if per_head else diagonal[..., None, :, :]
    s_BKIJ /= tau
    i, j = jnp.arange(q.shape[-3])[:, None], jnp.arange(q.shape[-3])[None, :]
    bias_KIJ = jnp.zeros((1, 1, 1), dtype)
    if slopes is not None:
        bias_KIJ = bias_KIJ - slopes.astype(dtype)[:, None, None] * (i - j)[None]
    if self_bias is not None:
        beta_K11 = self_bias.astype(dtype)[:, None, None]
        bias_KIJ = bias_KIJ + jnp.where((i == j)[None], beta_K11, 0.0)
    visible = jnp.expand_dims(j <= i, range(s_BKIJ.ndim - 2))
    if segments is not None:
        same = segments[..., :, None] == segments[..., None, :]
        visible = visible & same[..., None, :, :]
    bias = jnp.expand_dims(bias_KIJ, range(s_BKIJ.ndim - 3))
    return jnp.where(visible, s_BKIJ + bias, -jnp.inf)


def log_partition(inputs: Inputs, tau: float) -> jax.Array:
    """lse_ik = log Σ_j exp s_ijk. [..., K, J]."""
    return jax.nn.logsumexp(scores(inputs, tau), axis=-1)


def attend(
    inputs: Inputs, tau: float, context: str
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(lse, o, a): `blockwise.attend` with the probabilities written out."""
    s_BKIJ = scores(inputs, tau)
    lse_BKJ = jax.nn.logsumexp(s_BKIJ, axis=-1)
    p_BKIJ = jnp.exp(s_BKIJ - lse_BKJ[..., None]).astype(inputs.q.dtype)
    product = dict(preferred_element_type=s_BKIJ.dtype)
    values = inputs.k if inputs.v is None else inputs.v
    o_BJKR = jnp.einsum("...kij,...jkr->...ikr", p_BKIJ, values, **product)
    a = None
    if context == "summed":
        a = jnp.einsum("...kij,...jd->...id", p_BKIJ, inputs.h, **product)
    elif context == "per_head":
        # heads first: XLA on CPU cannot write a bfloat16 product's float32 sums in another order
        a = jnp.swapaxes(jnp.einsum("...kij,...jd->...kid", p_BKIJ, inputs.h, **product), -3, -2)
    return lse_BKJ, o_BJKR, a

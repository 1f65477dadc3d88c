"""A diagonal of its own for each head, on a GPU: the kernels of a shared one, a head at a time.

Such a diagonal costs K times the products of a shared one, whoever computes them: each head has its
own tile g_ik·h_j, and its own dS for dg_ik. A head at a time both tiles are [B, P, P], the
products run at full speed, and memory is that of a shared diagonal.

Shapes as in `gpu_tiles`, K first.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cem_jax.kernels.call import Inputs


def forward_by_head(forward, inputs: Inputs, plan):
    """`forward` of a diagonal that the heads share, for each head; contexts are summed."""
    constant, by_head = _split(inputs)

    def step(total, own: Inputs):
        lse, o, a = forward(_join(constant, own), plan)
        return total if a is None else total + a, (lse[:, 0], o[:, :, 0])

    start = None if plan.context == "none" else jnp.zeros(inputs.h.shape, jnp.float32)
    a, (lse_KBJ, o_KBJR) = lax.scan(step, start, by_head)
    return jnp.moveaxis(lse_KBJ, 0, 1), jnp.moveaxis(o_KBJR, 0, 2), a


def backward_by_head(backward, inputs: Inputs, plan, lse, o, a, cotangents) -> Inputs:
    """`backward` likewise; what reaches h is summed over the heads."""
    constant, by_head = _split(inputs)
    dlse, do, da = cotangents

    def step(dh, x):
        own, lse_BJ, o_BJR, dlse_BJ, do_BJR = x
        found = backward(
            _join(constant, own),
            plan,
            lse_BJ[:, None],
            o_BJR[:, :, None],
            a,
            (dlse_BJ[:, None], do_BJR[:, :, None], da),
        )
        return dh + found.h.astype(jnp.float32), found._replace(h=None)

    rows, wide = (lambda x: jnp.moveaxis(x, 1, 0)), (lambda x: jnp.moveaxis(x, 2, 0))
    start = jnp.zeros(inputs.h.shape, jnp.float32)
    dh, found = lax.scan(step, start, (by_head, rows(lse), wide(o), rows(dlse), wide(do)))
    merge = lambda x: None if x is None else jnp.moveaxis(x[:, :, :, 0], 0, 2)
    flat = lambda x: None if x is None else x[:, 0]
    return Inputs(
        q=merge(found.q),
        k=merge(found.k),
        v=merge(found.v),
        g=jnp.moveaxis(found.g, 0, 2),
        h=dh.astype(inputs.h.dtype),
        slopes=flat(found.slopes),
        self_bias=flat(found.self_bias),
        segments=None,
    )


def _split(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """(what the heads share, what each has: the heads first)."""
    nothing = Inputs(*[None] * len(inputs))
    shared = nothing._replace(h=inputs.h, segments=inputs.segments)
    own = inputs._replace(h=None, segments=None)
    wide = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), own._replace(slopes=None, self_bias=None))
    heads_alone = lambda x: None if x is None else x[:, None]
    with_head = wide._replace(**{n: _one_head(getattr(wide, n)) for n in "qkv"})
    return shared, with_head._replace(
        slopes=heads_alone(inputs.slopes), self_bias=heads_alone(inputs.self_bias)
    )


def _one_head(x_KBJR):
    return None if x_KBJR is None else x_KBJR[:, :, :, None]


def _join(shared: Inputs, own: Inputs) -> Inputs:
    return own._replace(h=shared.h, segments=shared.segments)

"""Per-head diagonals on a GPU: the kernels for a shared diagonal, run one head at a time.

Per-head diagonals cost K times the products of a shared one in any implementation: each head has
its own tile g_ik·h_j, and its own dS for dg_ik. One head at a time, both tiles are [B, P, P], the
products run at full speed, and memory is the same as for a shared diagonal.

Shapes as in `tiles`, K first.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from cem_jax.kernels.call import BIASES, Call, Options, Outputs, Scores


def forward_by_head(forward: Callable[..., Outputs], call: Call, options: Options) -> Outputs:
    """Run `forward`, made for a shared diagonal, for each head; sum the averages of h."""

    def step(total, own: Call):
        lse, o, a = forward(_with_shared(own, call), options)
        return total if a is None else total + a, (lse[:, 0], o[:, :, 0])

    start = None if options.average == "none" else jnp.zeros(call.h.shape, jnp.float32)
    a, (lse_KBJ, o_KBJR) = lax.scan(step, start, _by_head(call))
    return Outputs(jnp.moveaxis(lse_KBJ, 0, 1), jnp.moveaxis(o_KBJR, 0, 2), a)


def backward_by_head(
    backward: Callable[..., Call], call: Call, options: Options, outputs: Outputs, bar: Outputs
) -> Call:
    """Run `backward` for each head; sum the gradients of h over the heads."""
    apart = lambda x: (jnp.moveaxis(x.lse, 1, 0), jnp.moveaxis(x.o, 2, 0))
    of_head = lambda lse_BJ, o_BJR, a: Outputs(lse_BJ[:, None], o_BJR[:, :, None], a)

    def step(dh, x):
        own, own_outputs, own_bar = x
        found = backward(
            _with_shared(own, call),
            options,
            of_head(*own_outputs, outputs.a),
            of_head(*own_bar, bar.a),
        )
        return dh + found.h.astype(jnp.float32), found._replace(h=None)

    start = jnp.zeros(call.h.shape, jnp.float32)
    dh, found = lax.scan(step, start, (_by_head(call), apart(outputs), apart(bar)))
    merge = lambda x: None if x is None else jnp.moveaxis(x[:, :, :, 0], 0, 2)
    biases = {n: x[:, 0] for n in BIASES if (x := getattr(found.scores, n)) is not None}
    return Call(
        q=merge(found.q),
        k=merge(found.k),
        v=merge(found.v),
        g=jnp.moveaxis(found.g, 0, 2),
        h=dh.astype(call.h.dtype),
        scores=Scores(**biases),
    )


def _by_head(call: Call) -> Call:
    """Return the per-head arrays, with the head axis first, as calls of one head."""
    one = lambda x: None if x is None else jnp.moveaxis(x, 2, 0)[:, :, :, None]
    biases = {n: x[:, None] for n in BIASES if (x := getattr(call.scores, n)) is not None}
    return Call(
        q=one(call.q),
        k=one(call.k),
        v=one(call.v),
        g=jnp.moveaxis(call.g, 2, 0),
        scores=Scores(**biases),
    )


def _with_shared(own: Call, call: Call) -> Call:
    scores = own.scores._replace(segments=call.scores.segments)
    return own._replace(h=call.h, scores=scores)

"""Log-partition functions of attention scores, and their derivatives.

Attention is the derivative of a log-partition function. With

    s_ijk = (k_jk·q_ik + g_i·h_j)/τ − m_k(i−j) + β_k[i=j]        lse_ik = log Σ_{j≤i} exp s_ijk

∂lse_ik/∂q_ik = o_ik/τ, o_ik = Σ_j softmax_j(s_ijk) k_jk: attention with its keys as values. So
`jax.grad` of an energy −τ Σ_k lse_ik runs the fused dispatch, and training differentiates that.

This package knows nothing of the rest of the project.
"""

import operator
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal
from jaxtyping import Array, Float, Int

from cem_jax.kernels import dense, dispatch
from cem_jax.kernels.cached import attend_cached
from cem_jax.kernels.call import Inputs, Plan, check_context, number, validated
from cem_jax.kernels.dispatch import (
    FUSED_PLATFORMS,
    IMPLEMENTATIONS,
    OUTPUT,
    Unavailable,
    target_platform,
)

__all__ = [
    "FUSED_PLATFORMS",
    "IMPLEMENTATIONS",
    "OUTPUT",
    "Unavailable",
    "attend",
    "attend_cached",
    "log_partition",
    "target_platform",
    "total_log_partition",
]


def log_partition(
    q: Float[Array, "*B J K R"],
    k: Float[Array, "*B J K R"],
    g: Float[Array, "*B J D"] | Float[Array, "*B J K D"] | None = None,
    h: Float[Array, "*B J D"] | None = None,
    *,
    tau: float,
    slopes: Float[Array, " K"] | None = None,
    self_bias: Float[Array, " K"] | None = None,
    segments: Int[Array, "*B J"] | None = None,
    implementation: str = "auto",
    block_sizes: tuple[int, int] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "*B K J"]:
    """lse_ik = log Σ_{j≤i} exp s_ijk of the package's docstring, in float32 (float64 for float64).

    Differentiable in every floating argument, twice. A position sees itself and what lies before
    it, within its own segment where `segments` are given. `g` = d∘u and `h` carry the diagonal of
    the interaction matrix; a `g` without head axis is shared by the heads, its tile computed once.
    `implementation`: dense (every score written out), blockwise (O(J) memory, any platform), pallas
    (the fused kernel of a TPU or a GPU), or auto: fused where that can be, else blockwise.
    `block_sizes`: positions of a query and a key block. `interpret`: run the TPU kernel in Pallas'
    interpreter. `tau` is a number, not differentiated. Raises ValueError on shapes that do not fit,
    `Unavailable` where pallas is demanded and cannot be.
    """
    inputs = validated(q, k, g, h, slopes, self_bias, segments)
    return _log_partition(inputs, tau, implementation, block_sizes, interpret, head_sum=False)


def total_log_partition(
    q, k, g=None, h=None, *, tau, slopes=None, self_bias=None, segments=None,
    implementation="auto", block_sizes=None, interpret=None,
) -> Float[Array, "*B J"]:  # fmt: skip
    """Σ_k lse_ik, all an energy needs; arguments as in `log_partition`.

    Knowing that the heads are summed, its derivative with respect to a shared `g` is one
    vector Σ_k Σ_j α_ijk h_j a position, instead of one for each head.
    """
    inputs = validated(q, k, g, h, slopes, self_bias, segments)
    return _log_partition(inputs, tau, implementation, block_sizes, interpret, head_sum=True)


def attend(
    q, k, g=None, h=None, *, tau, slopes=None, self_bias=None, segments=None,
    v=None, context="none", implementation="auto", block_sizes=None, interpret=None,
):  # fmt: skip
    """What the derivatives are made of: (lse [*B K J], o [*B J K R], a).

    o_ik = Σ_j α_ijk k_jk, or Σ_j α_ijk v_jk where values of their own are given. `context`: "none"
    (a is None), "summed": a_i = Σ_k Σ_j α_ijk h_j [*B J D], or "per_head": a_ik = Σ_j α_ijk h_j
    [*B J K D]. o and a are float32, or float64 for float64 inputs.
    """
    inputs = validated(q, k, g, h, slopes, self_bias, segments, v)
    check_context(context)
    if context != "none" and h is None:
        raise ValueError(f"context={context!r} averages h, which is not given")
    plan = _plan(tau, context, implementation, block_sizes, interpret)
    return dispatch.attend(implementation, inputs, plan)


def _plan(tau, context, implementation, block_sizes, interpret) -> Plan:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}"
        )
    if interpret and implementation != "pallas":
        raise ValueError(f"interpret is for 'pallas'; implementation={implementation!r} is XLA")
    return Plan(number(tau), context, _blocks(block_sizes), interpret)


def _blocks(sizes) -> tuple[int, int] | None:
    if sizes is None:
        return None
    try:
        queries, keys = map(operator.index, sizes)
    except (TypeError, ValueError):
        queries = keys = 0
    if min(queries, keys) < 1:
        raise ValueError(f"block_sizes must be two positive whole numbers; got {sizes!r}")
    return queries, keys


def _log_partition(inputs: Inputs, tau, implementation, block_sizes, interpret, head_sum):
    plan = _plan(tau, "none", implementation, block_sizes, interpret)
    if implementation == "dense":
        lse_BKJ = dense.log_partition(inputs, plan.tau)
        return lse_BKJ.sum(-2) if head_sum else lse_BKJ
    return _fused_log_partition((implementation, plan, head_sum), inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused_log_partition(static, inputs: Inputs):
    implementation, plan, head_sum = static
    lse_BKJ, _, _ = dispatch.attend(implementation, inputs, plan)
    return lse_BKJ.sum(-2) if head_sum else lse_BKJ


def _forward(static, primals: Inputs):
    implementation, plan, head_sum = static
    is_primal = lambda x: isinstance(x, CustomVJPPrimal)
    inputs = jax.tree.map(lambda p: p.value, primals, is_leaf=is_primal)
    asked = {n for n, p in primals._asdict().items() if p is not None and p.perturbed}
    shared_g = inputs.g is not None and inputs.g.ndim < inputs.q.ndim
    # An energy's gradient with respect to the state asks for q, perhaps g: then attention itself is
    # the derivative. Anything else takes attention's own backward pass.
    if asked <= {"q", "g"} and (head_sum or not shared_g or "g" not in asked):
        context = ("summed" if shared_g else "per_head") if "g" in asked else "none"
        plan = plan._replace(context=context)
        lse_BKJ, o_BJKR, a = dispatch.attend(implementation, inputs, plan)
        residuals = (inputs, o_BJKR, a, None)
    else:
        alone = lambda t: dispatch.attend(implementation, t, plan)[0]
        lse_BKJ, pull_back = jax.vjp(alone, inputs)
        residuals = (inputs, None, None, pull_back)
    return (lse_BKJ.sum(-2) if head_sum else lse_BKJ), residuals


def _backward(static, residuals, lse_bar):
    _, plan, head_sum = static
    inputs, o_BJKR, a, pull_back = residuals
    heads = inputs.q.shape[-2]
    if head_sum:
        bar_BKJ = jnp.broadcast_to(
            lse_bar[..., None, :], (*lse_bar.shape[:-1], heads, lse_bar.shape[-1])
        )
    else:
        bar_BKJ = lse_bar
    if pull_back is not None:
        return pull_back(bar_BKJ)
    scale_BJK1 = jnp.swapaxes(bar_BKJ, -1, -2)[..., None] / plan.tau
    g_bar = None
    if a is not None:
        per_head = a.ndim == o_BJKR.ndim
        g_bar = a * (scale_BJK1 if per_head else scale_BJK1[..., 0, :])
        g_bar = g_bar.astype(inputs.g.dtype)
    q_bar = (scale_BJK1 * o_BJKR).astype(inputs.q.dtype)
    nothing = dict.fromkeys(Inputs._fields)
    return (Inputs(**{**nothing, "q": q_bar, "g": g_bar}),)


_fused_log_partition.defvjp(_forward, _backward, symbolic_zeros=True)

"""Fused attention on a GPU: Pallas kernels through its Triton lowering, Ampere to Hopper.

    forward   S = c·g·hᵀ once for all heads; o and lse; in exact mode a = (Σ_k P^k) h
    backward  S again, E = e·hᵀ in exact mode; dq; dk (and dv); Σ_k dS^k; dg and dh as products

No atomics: the same inputs give the same bits. Nothing but this module is used from outside, so
another lowering can take its place. Equations in `blockwise`; legend in `gpu_tiles`.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from cem_jax.kernels.call import Inputs, Plan
from cem_jax.kernels.gpu.backward import key_gradients, query_gradient
from cem_jax.kernels.gpu.blocks import product, refused_blocks, task
from cem_jax.kernels.gpu.forward import attend
from cem_jax.kernels.gpu.per_head import backward_by_head, forward_by_head
from cem_jax.kernels.gpu.shared import common_score, head_sums, pair_scores, weighted_sums
from cem_jax.kernels.gpu.tiles import LOG2E, Operands

WIDEST = 128  # of a head: accumulators of a wider one do not fit into registers
OLDEST = 80  # compute capability, times ten: Ampere's, the first that XLA compiles Triton for


def obstacle(inputs: Inputs, plan: Plan) -> str | None:
    """Why these kernels cannot run this call; None if they can. Needs shapes and dtypes only.

    On a GPU, or where a mesh names one, also whether that one can.
    """
    if inputs.q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the GPU kernels take bfloat16, float16 and float32, not {inputs.q.dtype}"
    if inputs.q.shape[-1] > WIDEST:
        return f"the GPU kernels take heads of up to {WIDEST}, not {inputs.q.shape[-1]}"
    if plan.context == "per_head":
        return "the GPU kernels average contexts over all heads together, not for each"
    if inputs.split:
        return "the GPU kernels take whole sequences, and the mesh splits positions (mesh.context)"
    return refused_blocks(plan) or _refused_device()


def forward(inputs: Inputs, plan: Plan):
    """(lse [B, K, J], o [B, J, K, R], a [B, J, D] or None), all float32."""
    if _per_head(inputs):
        return forward_by_head(forward, inputs, plan)
    operands, common_B1J = _scored(inputs, plan)
    lse, o = attend(operands, task("forward", inputs, plan))
    a = None
    if plan.context != "none":
        how = task("sums", inputs, plan)
        (p_BPP,) = head_sums(
            operands._replace(lse=LOG2E * lse), how, derivative=False, probability=True
        )
        a = weighted_sums(
            [(p_BPP, inputs.h)], jnp.float32, product("sums", inputs, plan), over_queries=False
        )
    return lse + common_B1J, o, a


def backward(inputs: Inputs, plan: Plan, lse, o, a, cotangents) -> Inputs:
    """Gradients by input, in its dtype; None for the segments and for what is absent."""
    if _per_head(inputs):
        return backward_by_head(backward, inputs, plan, lse, o, a, cotangents)
    dlse, do, da = cotangents
    exact = plan.context != "none"
    do_BJKR = do.astype(inputs.q.dtype)  # rounded first, see `blockwise`
    delta = jnp.einsum("bjkr,bjkr->bkj", do_BJKR.astype(jnp.float32), o) - dlse
    e_BJD = da.astype(inputs.q.dtype) if exact else None
    operands, common_B1J = _scored(inputs, plan)
    lse = LOG2E * (lse - common_B1J)
    operands = operands._replace(do=do_BJKR, lse=lse, delta=delta / plan.tau)
    if exact:
        # a gradient may be far below what float16 holds
        extra = pair_scores(e_BJD, inputs.h, 1.0, inputs.q.dtype, product("scores", inputs, plan))
        operands = operands._replace(extra=extra)
    dq, delta = query_gradient(operands, task("queries", inputs, plan))
    operands = operands._replace(delta=delta)
    dk, dv, dslopes, dself_bias = key_gradients(operands, task("keys", inputs, plan))
    dg = dh = None
    if inputs.g is not None:
        dg, dh = _diagonal_gradients(operands, inputs, e_BJD, plan)
    found = Inputs(dq, dk, dv, dg, dh, dslopes, dself_bias, None)
    return Inputs(
        *(None if x is None else x.astype(y.dtype) for x, y in zip(found, inputs, strict=True))
    )


def _refused_device() -> str | None:
    try:
        capability = _compute_capability()
    except ValueError as error:
        return f"Pallas does not know this GPU: {error}"
    if capability is not None and capability < OLDEST:
        return (
            f"the GPU kernels need compute capability {OLDEST / 10} (Ampere), not {capability / 10}"
        )
    return None


def _compute_capability() -> int | None:
    """Times ten, of the GPU that a program is made for; None where that is no GPU."""
    if hasattr(triton, "is_gpu_device"):
        return triton.get_gpu_info().compute_capability if triton.is_gpu_device() else None
    if jax.default_backend() != "gpu":  # such a JAX lowers for what it runs on
        return None
    return int(jax.local_devices()[0].compute_capability.replace(".", ""))


def _per_head(inputs: Inputs) -> bool:
    return inputs.g is not None and inputs.g.ndim == inputs.q.ndim


def _scored(inputs: Inputs, plan: Plan) -> tuple[Operands, jax.Array | float]:
    """What a forward pass reads, and what it leaves out of each row's scores. [B, 1, J]."""
    as_float = lambda x: None if x is None else x.astype(jnp.float32)
    tile, common_B1J = None, 0.0
    if inputs.g is not None:
        pair, how = (inputs.g, inputs.h), product("scores", inputs, plan)
        if inputs.q.dtype == jnp.float32:
            tile = pair_scores(*pair, LOG2E / plan.tau, jnp.float32, how)
        else:
            # logits near 10 would lose 0.02 to 0.04 to bfloat16, and large ones too much to float16
            common_BJ = common_score(*pair, 1 / plan.tau)
            tile = pair_scores(*pair, LOG2E / plan.tau, jnp.float16, how, LOG2E * common_BJ)
            common_B1J = common_BJ[:, None]
    operands = Operands(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        tile=tile,
        slopes=as_float(inputs.slopes),
        self_bias=as_float(inputs.self_bias),
        segments=None if inputs.segments is None else inputs.segments.astype(jnp.int32),
    )
    return operands, common_B1J


def _diagonal_gradients(operands: Operands, inputs: Inputs, e_BJD, plan: Plan):
    """(dg, dh) [B, J, D]: Σ_j S̄ h_j and Σ_i (S̄ g_i + A e_i), S̄ = Σ_k c·dS^k, A = Σ_k P^k."""
    exact = e_BJD is not None
    how = product("sums", inputs, plan)
    sums = head_sums(operands, task("sums", inputs, plan), derivative=True, probability=exact)
    dg = weighted_sums([(sums[0], inputs.h)], inputs.g.dtype, how, over_queries=False)
    pairs = zip(sums, (inputs.g, e_BJD) if exact else (inputs.g,), strict=True)
    return dg, weighted_sums(list(pairs), inputs.h.dtype, how, over_queries=True)

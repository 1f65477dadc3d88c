"""Fused attention on a GPU: Pallas kernels through its Triton lowering, Ampere to Hopper.

    forward   S = c·g·hᵀ once for all heads; o and lse; if requested, a = (Σ_k P^k) h
    backward  S again, E = e·hᵀ if a was requested; dq; dk (and dv); Σ_k dS^k; dg and dh as products

No atomics: the same inputs give the same bits. Only this module is used from outside, so another
lowering can replace it. Equations in `blockwise`; legend in `tiles`.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from cem_jax.kernels.call import BIASES, Call, Implementation, Options, Outputs, Scores
from cem_jax.kernels.gpu.backward import key_gradients, query_gradient
from cem_jax.kernels.gpu.blocks import product, refused_blocks, task
from cem_jax.kernels.gpu.forward import attend
from cem_jax.kernels.gpu.per_head import backward_by_head, forward_by_head
from cem_jax.kernels.gpu.shared import common_score, head_sums, pair_scores, weighted_sums
from cem_jax.kernels.gpu.tiles import LOG2E, Operands

WIDEST = 128  # head dim: accumulators of a wider head do not fit into registers
OLDEST = 80  # compute capability times ten: Ampere, the first that XLA compiles Triton for


def obstacle(call: Call, options: Options) -> str | None:
    """Return why these kernels cannot run this call, or None. Needs only shapes and dtypes.

    On a GPU, or if a mesh names one, this includes whether that GPU can.
    """
    if call.q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the GPU kernels take bfloat16, float16 and float32, not {call.q.dtype}"
    if call.q.shape[-1] > WIDEST:
        return f"the GPU kernels take heads of up to {WIDEST}, not {call.q.shape[-1]}"
    if options.average == "per_head":
        return "the GPU kernels average h for all heads together, not for each"
    if call.split:
        return "the GPU kernels take whole sequences, and the mesh splits positions (mesh.context)"
    return refused_blocks(options) or _refused_device()


def forward(call: Call, options: Options) -> Outputs:
    """Return the outputs, in float32."""
    if call.per_head:
        return forward_by_head(forward, call, options)
    operands, common_B1J = _scored(call, options)
    lse, o = attend(operands, task("forward", call, options))
    a = None
    if options.average != "none":
        operands = operands._replace(lse=LOG2E * lse)
        how = task("sums", call, options)
        (p_BPP,) = head_sums(operands, how, derivative=False, probability=True)
        how = product("sums", call, options)
        a = weighted_sums([(p_BPP, call.h)], jnp.float32, how, over_queries=False)
    return Outputs(lse + common_B1J, o, a)


def backward(call: Call, options: Options, outputs: Outputs, bar: Outputs) -> Call:
    """Return the gradients of `call`, given `bar`, those of `outputs`."""
    if call.per_head:
        return backward_by_head(backward, call, options, outputs, bar)
    do_BJKR = bar.o.astype(call.q.dtype)  # rounded first, see `blockwise`
    delta = jnp.einsum("bjkr,bjkr->bkj", do_BJKR.astype(jnp.float32), outputs.o) - bar.lse
    e_BJD = None if options.average == "none" else bar.a.astype(call.q.dtype)
    operands, common_B1J = _scored(call, options)
    lse = LOG2E * (outputs.lse - common_B1J)
    operands = operands._replace(do=do_BJKR, lse=lse, delta=delta / options.tau)
    if e_BJD is not None:
        # a gradient may be far below float16's range
        how = product("scores", call, options)
        operands = operands._replace(cross=pair_scores(e_BJD, call.h, 1.0, call.q.dtype, how))
    dq, delta = query_gradient(operands, task("queries", call, options))
    operands = operands._replace(delta=delta)
    dk, dv, dscores = key_gradients(operands, task("keys", call, options))
    dg = dh = None
    if call.g is not None:
        dg, dh = _diagonal_gradients(operands, call, e_BJD, options)
    return Call(q=dq, k=dk, v=dv, g=dg, h=dh, scores=dscores).as_gradient_of(call)


IMPLEMENTATION = Implementation(forward, backward, obstacle)


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
    """Return ten times the target GPU's compute capability; None if the target is no GPU."""
    if hasattr(triton, "is_gpu_device"):
        return triton.get_gpu_info().compute_capability if triton.is_gpu_device() else None
    if jax.default_backend() != "gpu":  # such a JAX lowers for its own backend
        return None
    return int(jax.local_devices()[0].compute_capability.replace(".", ""))


def _scored(call: Call, options: Options) -> tuple[Operands, jax.Array | float]:
    """Return the forward pass's operands, and the part left out of each row's scores [B, 1, J]."""
    tile, common_B1J = None, 0.0
    if call.g is not None:
        pair, how = (call.g, call.h), product("scores", call, options)
        if call.q.dtype == jnp.float32:
            tile = pair_scores(*pair, LOG2E / options.tau, jnp.float32, how)
        else:
            # bfloat16 loses 0.02 to 0.04 at logits near 10, float16 too much at large ones
            common_BJ = common_score(*pair, 1 / options.tau)
            tile = pair_scores(*pair, LOG2E / options.tau, jnp.float16, how, LOG2E * common_BJ)
            common_B1J = common_BJ[:, None]
    scores, segments = call.scores, call.scores.segments
    biases = {n: x.astype(jnp.float32) for n in BIASES if (x := getattr(scores, n)) is not None}
    operands = Operands(
        q=call.q,
        k=call.k,
        v=call.v,
        shared=tile,
        scores=Scores(**biases, segments=None if segments is None else segments.astype(jnp.int32)),
    )
    return operands, common_B1J


def _diagonal_gradients(operands: Operands, call: Call, e_BJD, options: Options):
    """Return dg, dh [B, J, D]: Σ_j S̄ h_j and Σ_i (S̄ g_i + A e_i), S̄ = Σ_k c·dS^k, A = Σ_k P^k."""
    beside = (call.g,) if e_BJD is None else (call.g, e_BJD)
    how = product("sums", call, options)
    sums = head_sums(
        operands, task("sums", call, options), derivative=True, probability=len(beside) == 2
    )
    dg = weighted_sums([(sums[0], call.h)], call.g.dtype, how, over_queries=False)
    pairs = zip(sums, beside, strict=True)
    return dg, weighted_sums(list(pairs), call.h.dtype, how, over_queries=True)

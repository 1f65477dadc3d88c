"""Attention, its keys as values or with values of their own, fused for TPUs: Pallas, Mosaic.

What `blockwise` computes, in one kernel forward and one backward, of two kinds: resident ones keep
all keys of a sequence in VMEM (`tpu_forward`, `tpu_backward`: they hold the mathematics), streamed
ones a block of them (`tpu_streamed_forward`, `tpu_streamed_backward`), for what does not fit.
`tpu_layout` says how arrays lie in HBM. Streamed kernels also run on a device that has some of a
sequence's queries (`Chunks`). Here: which kernel runs, and what cannot.
"""

import jax.numpy as jnp
from jax import lax

from cem_jax.kernels.call import Inputs, Plan
from cem_jax.kernels.chunks import Chunks
from cem_jax.kernels.tpu import backward, forward, streamed_backward, streamed_forward
from cem_jax.kernels.tpu.call import call, fitted, needed
from cem_jax.kernels.tpu.layout import SCALARS, restore
from cem_jax.kernels.tpu.plan import LANES, Sizes, vmem_capacity

DTYPES = ("bfloat16", "float16", "float32")
# Resident first: nothing moves twice
FORWARD = (forward, streamed_forward)
BACKWARD = (backward, streamed_backward)


def forward(inputs: Inputs, plan: Plan, chunks: Chunks | None = None):
    """lse [B, K, J], o [B, J, K, R], a [B, J, D] or None, in float32."""
    kernel, sizes = fitted(FORWARD, inputs, plan)
    found = call(kernel, sizes, plan.interpret, _computable(inputs, sizes)._asdict(), chunks)
    batch, asking, *_ = inputs.q.shape
    o_BJKR = restore(found["o"], inputs.q.shape)
    a_BJD = restore(found["a"], (batch, asking, sizes.model)) if sizes.exact else None
    return found["lse"][..., :asking], o_BJKR, a_BJD


def backward(
    inputs: Inputs, plan: Plan, lse, o, a, cotangents, chunks: Chunks | None = None
) -> Inputs:
    """Gradients of every floating input, in its dtype; None for what is absent.

    `lse`, `o`, `a` are the forward's, `cotangents` theirs. `a` is not needed.
    """
    del a
    kernel, sizes = fitted(BACKWARD, inputs, plan)
    dlse, do, da = cotangents
    # do is rounded first: do·k − do·o of a row that sees one key is then 0 in low precision too
    do = do.astype(sizes.dtype)
    do_o_BJK = (do.astype(jnp.float32) * o).sum(-1)
    delta_BKJ = jnp.swapaxes(do_o_BJK, 1, 2) - dlse
    arrays = _computable(inputs, sizes)._asdict() | dict(lse=lse, delta=delta_BKJ, do=do, da=da)
    found = call(kernel, sizes, plan.interpret, arrays, chunks)

    def gradient(name, x):
        if f"d{name}" not in found:
            return None
        d = found[f"d{name}"]
        if chunks is not None and kernel.operand(f"d{name}", sizes).part == "hbm":
            # no program was there to write sums of keys behind the last query
            j = lax.broadcasted_iota(jnp.int32, d.shape, d.ndim - 1)
            d = jnp.where(j < chunks.end, d, 0.0)
        d = d.sum((0, 2, 3)) if name in SCALARS else restore(d, x.shape)
        return d.astype(x.dtype)

    return Inputs(**{name: gradient(name, x) for name, x in inputs._asdict().items()})


def obstacle(inputs: Inputs, plan: Plan) -> str | None:
    """Why this call cannot run on a TPU, or None. `inputs` may be shapes alone."""
    if str(inputs.q.dtype) not in DTYPES:
        return f"the TPU kernels compute in {', '.join(DTYPES)}, not {inputs.q.dtype}"
    if plan.context == "per_head":
        return "the TPU kernels average h for all heads together, not for each"
    chunk = inputs.q.shape[1] // 2
    if inputs.split and chunk % LANES:
        return (
            f"the mesh splits positions (mesh.context) into chunks of {chunk}; the TPU kernels "
            f"take multiples of {LANES}"
        )
    if plan.blocks is not None:
        queries, keys = plan.blocks
        if queries % LANES or keys % LANES or queries % keys:
            return (
                f"block sizes for TPU are multiples of {LANES}, the query block one of the key "
                f"block; got {plan.blocks}"
            )
        if inputs.split and chunk % queries:
            return f"query blocks of {queries} do not divide a device's chunks of {chunk} positions"
    need = max(needed(*fitted(kernels, inputs, plan)) for kernels in (FORWARD, BACKWARD))
    need, room = need / 2**20, vmem_capacity() / 2**20
    if need > room:
        _, _, heads, width = inputs.q.shape
        return (
            f"a block of {heads} heads of {width} columns takes {need:.0f} MiB of VMEM; "
            f"the device has {room:.0f}"
        )
    return None


def _computable(inputs: Inputs, sizes: Sizes) -> Inputs:
    """In the kernels' type."""
    cast = lambda x: x if x is None else x.astype(sizes.dtype)
    return Inputs(*map(cast, inputs[:5]), *inputs[5:])

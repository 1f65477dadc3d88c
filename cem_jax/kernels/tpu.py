"""Attention, its keys as values or with values of their own, fused for TPUs: Pallas, Mosaic.

What `blockwise` computes, in one kernel forward and one backward; `tpu_forward` and `tpu_backward`
hold the mathematics. Here are the layouts in HBM, the grid and what cannot run.

In HBM arrays are [B, K·R, J] and [B, D, J], positions last: XLA itself lays a [B, J, D] of 672
columns out so, since nothing is padded then, and the transpose moves nothing. J is padded with
zeros to whole blocks: no real query sees a padded key, and a padded query has no cotangent.
"""

from cem_jax.kernels import tpu_backward, tpu_forward
from cem_jax.kernels.inputs import Inputs, Plan
from cem_jax.kernels.tpu_call import SCALARS, call, fitted, needed, positions_first
from cem_jax.kernels.tpu_plan import LANES, vmem_capacity

DTYPES = ("bfloat16", "float16", "float32")


def forward(inputs: Inputs, plan: Plan):
    """lse [B, K, J], o [B, J, K, R], a [B, J, D] or None, in float32."""
    sizes = fitted(tpu_forward, inputs, plan)
    found = call(tpu_forward, sizes, plan.interpret, _computable(inputs, sizes)._asdict())
    o_BJKR = positions_first(found["o"], inputs.q.shape)
    a_BJD = positions_first(found["a"], inputs.h.shape) if sizes.exact else None
    return found["lse"][..., : inputs.q.shape[1]], o_BJKR, a_BJD


def backward(inputs: Inputs, plan: Plan, lse, o, a, cotangents) -> Inputs:
    """Gradients of every floating input, in its dtype; None for what is absent.

    `lse`, `o`, `a` are the forward's, `cotangents` theirs. `a` is not needed.
    """
    del a
    sizes = fitted(tpu_backward, inputs, plan)
    arrays = _computable(inputs, sizes)._asdict() | dict(lse=lse, o=o)
    arrays |= dict(zip(("dlse", "do", "da"), cotangents, strict=True))
    found = call(tpu_backward, sizes, plan.interpret, arrays)

    def gradient(name, x):
        if f"d{name}" not in found:
            return None
        d = found[f"d{name}"]
        d = d.sum((0, 2, 3)) if name in SCALARS else positions_first(d, x.shape)
        return d.astype(x.dtype)

    return Inputs(**{name: gradient(name, x) for name, x in inputs._asdict().items()})


def obstacle(inputs: Inputs, plan: Plan) -> str | None:
    """Why this call cannot run on a TPU, or None. `inputs` may be shapes alone."""
    if str(inputs.q.dtype) not in DTYPES:
        return f"the TPU kernels compute in {', '.join(DTYPES)}, not {inputs.q.dtype}"
    if plan.context == "per_head":
        return "the TPU kernels average h for all heads together, not for each"
    if plan.blocks is not None:
        queries, keys = plan.blocks
        if queries % LANES or keys % LANES or queries % keys:
            return (
                f"block sizes for TPU are multiples of {LANES}, the query block one of the key "
                f"block; got {plan.blocks}"
            )
    need = max(needed(x, fitted(x, inputs, plan)) for x in (tpu_forward, tpu_backward))
    need, room = need / 2**20, vmem_capacity() / 2**20
    if need > room:
        return (
            f"{inputs.q.shape[1]} positions of this shape take {need:.0f} MiB of VMEM; "
            f"the device has {room:.0f}"
        )
    return None


def _computable(inputs: Inputs, sizes) -> Inputs:
    """In the kernels' type."""
    cast = lambda x: x if x is None else x.astype(sizes.dtype)
    return Inputs(*map(cast, inputs[:5]), *inputs[5:])

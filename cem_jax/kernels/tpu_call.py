"""Calling a TPU kernel: its arrays in HBM, which block of each a program has, and what that takes.

Arrays go by name. A kernel module has `kernel(inputs, outputs, kept, sizes=…)` on dicts of
references, `arrays(sizes)`, the names of its inputs and outputs, `scratch(sizes)`
and BLOCKS, the (query, key) positions to try, best first.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cem_jax.kernels.inputs import Inputs, Plan
from cem_jax.kernels.tpu_plan import (
    RESERVED_VMEM,
    Sizes,
    padded_bytes,
    sizes_of,
    vmem_capacity,
)

SCALARS = ("slopes", "self_bias")  # read one by one, from SMEM
ROWS = ("lse", "dlse", "segments")  # come with positions last already
# One block a batch element, which each of its programs adds to; written to HBM once.
KEPT = ("dk", "dv", "dh", "dslopes", "dself_bias")


def given(sizes: Sizes) -> tuple[str, ...]:
    """Names of the inputs that a call has."""
    has = dict(v=sizes.values, g=sizes.model, h=sizes.model, slopes=sizes.slopes)
    has |= dict(self_bias=sizes.self_bias, segments=sizes.segments)
    return ("q", "k", *(name for name, present in has.items() if present))


def shape_of(name: str, sizes: Sizes):
    """(shape without batch, dtype) in HBM of an array, or of its gradient d…"""
    f32 = jnp.dtype(jnp.float32)
    if name in SCALARS:
        return (sizes.heads,), f32
    if name.removeprefix("d") in SCALARS:
        return (sizes.heads, 1, sizes.queries), f32
    if name == "segments":
        return (1, sizes.positions), jnp.dtype(jnp.int32)
    if name in ROWS:
        return (sizes.heads, sizes.positions), f32
    of = name.removeprefix("d")
    rows = sizes.heads * sizes.width
    if of in ("h", "a") or (of == "g" and sizes.diagonal == "shared"):
        rows = sizes.model
    elif of == "g":
        rows = sizes.heads * sizes.model
    return (rows, sizes.positions), f32 if of in ("o", "a") else sizes.dtype


def call(module, sizes: Sizes, interpret, arrays: dict) -> dict:
    """The kernel's outputs by name. Arrays [B, J, …], [B, K, J] or, segments, [B, J]."""
    inputs, outputs = module.arrays(sizes)
    batch = arrays["q"].shape[0]
    run = pl.pallas_call(
        partial(module.kernel, sizes=sizes),
        grid=(batch, sizes.positions // sizes.queries),
        in_specs=[{name: _spec(name, sizes) for name in inputs}],
        out_specs={name: _spec(name, sizes) for name in outputs},
        out_shape={
            name: jax.ShapeDtypeStruct((batch, *shape), dtype)
            for name in outputs
            for shape, dtype in [shape_of(name, sizes)]
        },
        scratch_shapes=[{n: pltpu.VMEM(*kept) for n, kept in module.scratch(sizes).items()}],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_capacity() - RESERVED_VMEM // 2,
        ),
        interpret=interpret or False,
        name=module.__name__.rsplit(".", 1)[-1],
    )
    return run({name: _flat(name, arrays[name], sizes) for name in inputs})


def fitted(module, inputs: Inputs, plan: Plan) -> Sizes:
    """With the kernel's first blocks that fit into the device, or its last."""
    for blocks in module.BLOCKS:
        sizes = sizes_of(inputs, plan, blocks)
        if needed(module, sizes) <= vmem_capacity():
            break
    return sizes


def needed(module, sizes: Sizes) -> int:
    """Bytes of VMEM: each block twice, to stream it, what the kernel keeps, and the compiler's."""
    names = [name for part in module.arrays(sizes) for name in part if name not in SCALARS]
    blocks = sum(padded_bytes(_block(name, sizes), shape_of(name, sizes)[1]) for name in names)
    kept = sum(padded_bytes(*x) for x in module.scratch(sizes).values())
    return 2 * blocks + kept + RESERVED_VMEM


def _flat(name: str, x, sizes: Sizes):
    """As in HBM: heads joined with their columns, positions last and padded with zeros."""
    if name in SCALARS:
        return x.astype(jnp.float32)
    if name == "segments":
        x = x.astype(jnp.int32)[:, None]
    elif name not in ROWS:
        x = jnp.swapaxes(x.reshape(*x.shape[:2], -1), 1, 2)
    missing = sizes.positions - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing))) if missing else x


def positions_first(x, shape: tuple):
    """A padded output [B, ·, J] as an array of `shape` [B, J, …]."""
    return jnp.swapaxes(x, 1, 2)[:, : shape[1]].reshape(shape)


def _block(name: str, sizes: Sizes) -> tuple[int, ...]:
    *rows, columns = shape_of(name, sizes)[0]
    return (*rows, columns if name in KEPT else sizes.queries)


def _spec(name: str, sizes: Sizes):
    if name in SCALARS:
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    block = _block(name, sizes)
    first = (0,) * (len(block) - 1)
    last = lambda i: 0 if name in KEPT else i
    return pl.BlockSpec((None, *block), lambda b, i: (b, *first, last(i)))

"""Calling a TPU kernel: its arrays by name, its grid, and the VMEM that it takes.

A kernel is a module with `kernel(inputs, outputs, kept, sizes=…)` on dicts of references, before
which come a streamed one's `Tables` if positions are split, `arrays(sizes)`, the names of its
inputs and outputs, `operand(name, sizes)`, how they lie (`tpu_layout`), `scratch(sizes)`, STREAMED,
whether keys come a block a grid step, and BLOCKS, the (query, key) positions to try, best first.
"""

from functools import partial

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cem_jax.kernels.call import Inputs, Plan
from cem_jax.kernels.chunks import Chunks
from cem_jax.kernels.tpu.layout import arrange
from cem_jax.kernels.tpu.plan import (
    RESERVED_VMEM,
    Sizes,
    padded_bytes,
    sizes_of,
    spilled,
    vmem_capacity,
)
from cem_jax.kernels.tpu.rows import tables_of


def call(module, sizes: Sizes, interpret, arrays: dict, chunks: Chunks | None = None) -> dict:
    """The kernel's outputs by name, as they lie in HBM. Arrays [B, J, …], [B, K, J], [B, J]."""
    inputs, outputs = (
        {name: module.operand(name, sizes) for name in names} for names in module.arrays(sizes)
    )
    batch = arrays["q"].shape[0]
    grid = (batch, sizes.query_blocks)
    if sizes.streamed:
        grid += (sizes.sweeps, sizes.key_blocks)
    tables = [] if chunks is None else [tables_of(chunks, sizes)]
    kept = {name: pltpu.VMEM(*x) for name, x in module.scratch(sizes).items()}
    # to wait for what the kernel itself copies, from HBM and to it
    left = [name for name, x in outputs.items() if x.part == "hbm"]
    kept |= {f"{name}_copied": pltpu.SemaphoreType.DMA((2,)) for name in left}
    run = pl.pallas_call(
        partial(module.kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=grid,
            in_specs=[{name: x.spec(sizes) for name, x in inputs.items()}],
            out_specs={name: x.spec(sizes) for name, x in outputs.items()},
            scratch_shapes=[kept],
        ),
        out_shape={
            name: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype) for name, x in outputs.items()
        },
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *["arbitrary"] * (len(grid) - 1)),
            vmem_limit_bytes=vmem_capacity() - RESERVED_VMEM // 2,
        ),
        interpret=interpret or False,
        name=module.__name__.rsplit(".", 1)[-1],
    )
    return run(*tables, {name: arrange(name, arrays, x, sizes) for name, x in inputs.items()})


def fitted(modules: tuple, inputs: Inputs, plan: Plan):
    """(module, sizes): the first kernel and its first blocks that fit into the device, or the last.

    Modules come best first. Of split positions a device has some queries for all keys, which no
    resident kernel can lay out as their block comes by.
    """
    for module in (module for module in modules if module.STREAMED or not inputs.split):
        for blocks in module.BLOCKS:
            sizes = sizes_of(inputs, plan, blocks, module.STREAMED)
            if needed(module, sizes) <= vmem_capacity():
                return module, sizes
    return module, sizes


def needed(module, sizes: Sizes) -> int:
    """Bytes of VMEM: blocks that stream, what the kernel keeps, and the compiler's."""
    names = [name for part in module.arrays(sizes) for name in part]
    blocks = sum(module.operand(name, sizes).vmem(sizes) for name in names)
    kept = sum(padded_bytes(*x) for x in module.scratch(sizes).values())
    return blocks + kept + spilled(sizes) + RESERVED_VMEM

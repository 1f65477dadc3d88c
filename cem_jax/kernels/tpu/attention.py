"""Fused attention for TPUs, with keys as values or with separate values: Pallas, Mosaic.

It computes the same as `blockwise`, in one forward and one backward kernel, each of two kinds:
resident kernels keep all keys of a sequence in VMEM; streamed ones keep one block, for sequences
that do not fit. Streamed kernels also run on a device that has some of a sequence's queries
(`Chunks`). This module chooses the kernel, says which calls cannot run, and calls it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cem_jax.kernels.call import BIASES, Call, Chunks, Implementation, Options, Outputs, Scores
from cem_jax.kernels.tpu import backward as backward_kernels
from cem_jax.kernels.tpu import forward as forward_kernels
from cem_jax.kernels.tpu import layout
from cem_jax.kernels.tpu.layout import Kernel, Program, Sizes
from cem_jax.kernels.tpu.tiles import refs_of

DTYPES = ("bfloat16", "float16", "float32")
# Resident first: it moves nothing twice
FORWARD = (forward_kernels.RESIDENT, forward_kernels.STREAMED)
BACKWARD = (backward_kernels.RESIDENT, backward_kernels.STREAMED)


def forward(call: Call, options: Options, chunks: Chunks | None = None) -> Outputs:
    """Return the outputs, in float32."""
    kernel, sizes = fitted(FORWARD, call, options)
    found = _run(kernel, sizes, options, _arrays(call, sizes), chunks)
    batch, asking, *_ = call.q.shape
    a = layout.restore(found["a"], (batch, asking, sizes.model)) if sizes.average else None
    return Outputs(found["lse"][..., :asking], layout.restore(found["o"], call.q.shape), a)


def backward(
    call: Call, options: Options, outputs: Outputs, bar: Outputs, chunks: Chunks | None = None
) -> Call:
    """Return the gradients of `call`, given `bar`, those of `outputs`; `outputs.a` is unused."""
    kernel, sizes = fitted(BACKWARD, call, options)
    # do is rounded first: do·k − do·o of a row that sees one key is then 0 in low precision too
    do = bar.o.astype(sizes.dtype)
    do_o_BJK = (do.astype(jnp.float32) * outputs.o).sum(-1)
    delta_BKJ = jnp.swapaxes(do_o_BJK, 1, 2) - bar.lse
    arrays = _arrays(call, sizes) | dict(lse=outputs.lse, delta=delta_BKJ, do=do, da=bar.a)
    found = _run(kernel, sizes, options, arrays, chunks)

    def gradient(name: str):
        d = found.get(f"d{name}")
        if d is None:
            return None
        if chunks is not None and kernel.operand(f"d{name}", sizes).part == "hbm":
            # no program wrote sums for keys after the last query
            j = lax.broadcasted_iota(jnp.int32, d.shape, d.ndim - 1)
            d = jnp.where(j < chunks.end, d, 0.0)
        return d.sum((0, 2, 3)) if name in BIASES else layout.restore(d, getattr(call, name).shape)

    scores = Scores(**{name: gradient(name) for name in BIASES})
    arrays = {name: gradient(name) for name in ("q", "k", "v", "g", "h")}
    return Call(**arrays, scores=scores).as_gradient_of(call)


def obstacle(call: Call, options: Options) -> str | None:
    """Return why this call cannot run on a TPU, or None; needs only shapes."""
    if str(call.q.dtype) not in DTYPES:
        return f"the TPU kernels compute in {', '.join(DTYPES)}, not {call.q.dtype}"
    if options.average == "per_head":
        return "the TPU kernels average h for all heads together, not for each"
    chunk = call.q.shape[1] // 2
    if call.split and chunk % layout.LANES:
        return (
            f"the mesh splits positions (mesh.context) into chunks of {chunk}; the TPU kernels "
            f"take multiples of {layout.LANES}"
        )
    if options.block_sizes is not None:
        queries, keys = options.block_sizes
        if queries % layout.LANES or keys % layout.LANES or queries % keys:
            return (
                f"block sizes for TPU are multiples of {layout.LANES}, the query block one of the "
                f"key block; got {options.block_sizes}"
            )
        if call.split and chunk % queries:
            return f"query blocks of {queries} do not divide a device's chunks of {chunk} positions"
    need = max(needed(*fitted(kernels, call, options)) for kernels in (FORWARD, BACKWARD))
    need, room = need / 2**20, layout.vmem_capacity() / 2**20
    if need > room:
        _, _, heads, width = call.q.shape
        return (
            f"a block of {heads} heads of {width} columns takes {need:.0f} MiB of VMEM; "
            f"the device has {room:.0f}"
        )
    return None


IMPLEMENTATION = Implementation(forward, backward, obstacle)


def fitted(kernels: tuple[Kernel, ...], call: Call, options: Options) -> tuple[Kernel, Sizes]:
    """Return the first kernel, with its first blocks, that fits the device; else the last.

    Kernels are ordered best first. With split positions a device has some queries and all keys;
    resident kernels lay keys out along with their query block, so they cannot run.
    """
    for kernel in (kernel for kernel in kernels if kernel.streamed or not call.split):
        for blocks in kernel.blocks:
            sizes = layout.sizes_of(call, options, blocks, kernel.streamed)
            if needed(kernel, sizes) <= layout.vmem_capacity():
                return kernel, sizes
    return kernel, sizes


def needed(kernel: Kernel, sizes: Sizes) -> int:
    """Return the bytes of VMEM for streamed blocks, the kernel's scratch, and the compiler."""
    names = [name for part in kernel.arrays(sizes) for name in part]
    blocks = sum(kernel.operand(name, sizes).vmem(sizes) for name in names)
    kept = sum(layout.padded_bytes(*x) for x in kernel.scratch(sizes).values())
    return blocks + kept + layout.spilled(sizes) + layout.RESERVED_VMEM


def _arrays(call: Call, sizes: Sizes) -> dict[str, Any]:
    """Return the arrays by name, in the kernels' dtype."""
    arrays = call.map(lambda x: x.astype(sizes.dtype))._asdict()
    return arrays | arrays.pop("scores")._asdict()


def _run(kernel: Kernel, sizes: Sizes, options: Options, arrays: dict, chunks: Chunks | None):
    """Return the kernel's outputs by name in HBM layout; arrays [B, J, …], [B, K, J], [B, J]."""
    inputs, outputs = (
        {name: kernel.operand(name, sizes) for name in names} for names in kernel.arrays(sizes)
    )
    batch = arrays["q"].shape[0]
    grid = (batch, sizes.query_blocks)
    if sizes.streamed:
        grid += (sizes.sweeps, sizes.key_blocks)
    tables = [] if chunks is None else [layout.tables_of(chunks, sizes)]
    kept = {name: pltpu.VMEM(*x) for name, x in kernel.scratch(sizes).items()}
    # for the kernel's own copies from and to HBM
    left = [name for name, x in outputs.items() if x.part == "hbm"]
    kept |= {f"{name}_copied": pltpu.SemaphoreType.DMA((2,)) for name in left}

    def body(*references):
        *tables, inputs, outputs, kept = references
        copied = {name: kept.pop(f"{name}_copied") for name in left}
        inputs, outputs, kept = map(refs_of, (inputs, outputs, kept))
        kernel.body(Program(inputs, outputs, kept, tables, copied), sizes)

    run = pl.pallas_call(
        body,
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
            vmem_limit_bytes=layout.vmem_capacity() - layout.RESERVED_VMEM // 2,
        ),
        interpret=options.interpret or False,
        name=kernel.name,
    )
    arranged = {name: layout.arrange(name, arrays, x, sizes) for name, x in inputs.items()}
    return run(*tables, arranged)

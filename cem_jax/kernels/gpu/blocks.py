"""Block sizes, warps and pipeline stages on a GPU, by kernel, dtype and lanes per head.

Chosen from compilations for an H200 (`benchmarks/gpu_static.py`): the largest tiles without spills.
"""

import jax.numpy as jnp

from cem_jax.kernels.call import Call, Options
from cem_jax.kernels.gpu.shared import Product
from cem_jax.kernels.gpu.tiles import SMALLEST, SQUARE, Task, lanes, square

# kernel: (queries, keys, warps, stages). Two programs fit on a multiprocessor, so that one's
# products overlap with the other's exponentials; tiles are long on the side that a program keeps,
# which saves cache traffic.
HALF = {
    "forward": (128, 64, 4, 2),
    "forward, wide": (128, 32, 4, 2),
    "queries": (128, 32, 4, 2),
    "keys": (32, 128, 4, 2),
    "keys, values": (32, 64, 4, 2),
    "sums": (64, 128, 8, 2),
    "sums, average": (64, 64, 4, 2),
}
# float32 products keep 24 bits, which tensor cores cannot, so they take many registers.
FULL = dict.fromkeys(HALF, (32, 32, 4, 2)) | {
    "queries": (32, 32, 8, 2),
    "keys": (16, 32, 8, 2),
    "keys, values": (16, 32, 8, 2),
}
# product: (model dims per chunk, warps, stages)
HALF_PRODUCTS = {"scores": (64, 8, 3), "sums": (128, 8, 3)}
FULL_PRODUCTS = {"scores": (32, 8, 2), "sums": (64, 8, 2)}


def task(kernel: str, call: Call, options: Options) -> Task:
    """Return the kernel's static options, with the requested blocks or else the table's."""
    _, positions, heads, width = call.q.shape
    table = FULL if call.q.dtype == jnp.float32 else HALF
    *blocks, warps, stages = table[_variant(kernel, call, options)]
    queries, keys = (min(size, square(positions)) for size in options.block_sizes or blocks)
    return Task(
        positions, heads, width, options.c, queries, keys, warps, stages, bool(options.interpret)
    )


def _variant(kernel: str, call: Call, options: Options) -> str:
    """Return the kernel's name in the tables: variants differ in how many registers they use."""
    if kernel == "forward" and lanes(call.q.shape[-1]) > 64:
        return "forward, wide"
    if kernel == "keys" and call.v is not None:
        return "keys, values"
    if kernel == "sums" and options.average != "none":
        return "sums, average"
    return kernel


def product(kernel: str, call: Call, options: Options) -> Product:
    table = FULL_PRODUCTS if call.q.dtype == jnp.float32 else HALF_PRODUCTS
    return Product(*table[kernel], bool(options.interpret))


def refused_blocks(options: Options) -> str | None:
    """Return why blocks of these sizes cannot run, or None."""
    if options.block_sizes is None:
        return None
    fits = all(SMALLEST <= n <= SQUARE and n & (n - 1) == 0 for n in options.block_sizes)
    if fits:
        return None
    return (
        f"blocks on a GPU are powers of two from {SMALLEST} to {SQUARE} positions, "
        f"not {tuple(options.block_sizes)}"
    )

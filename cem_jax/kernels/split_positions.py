"""Attention with its positions split over devices: each has some queries, and all keys.

Device r of n holds the positions from r·J/n on. Of 2n chunks of the sequence it would then own 2r
and 2r+1, and the last device would do most of the causal work. So for attention device r computes
chunks r and 2n−1−r: a causal row costs as many tiles as there are keys before it, so every device
then has the same number of tiles. The chunks are sent there, and o is sent back. The caller gathers
the keys and h, once for all steps.

This module is the code of one device, inside a shard_map; `axis` is the mesh axis, or several.

Shapes: B batch · J positions, P those of one device · K heads · R head dim · n devices.
"""

import jax
import numpy as np
from jax import lax

from cem_jax.kernels.call import Call, Chunks, Implementation, Options, Outputs


def exchanging(
    implementation: Implementation, *, axis: tuple[str, ...], devices: int
) -> Implementation:
    """Run an implementation on balanced chunks of the queries; outputs keep the original layout.

    Gradients of k, v and h are summed over devices; each device gets those of its own positions.
    """
    there = lambda x, dim: None if x is None else _travel(x, dim, axis, devices)
    back = lambda x, dim: None if x is None else _travel(x, dim, axis, devices, home=True)

    def travelled(call: Call) -> Call:
        return call._replace(q=there(call.q, 1), g=there(call.g, 1))

    def outputs_by(move, outputs: Outputs) -> Outputs:
        return Outputs(move(outputs.lse, 2), move(outputs.o, 1), move(outputs.a, 1))

    def chunks_of(call: Call) -> Chunks:
        return balanced(devices, call.q.shape[1] // 2, lax.axis_index(axis))

    def forward(call: Call, options: Options) -> Outputs:
        chunks = chunks_of(call)
        return outputs_by(back, implementation.forward(travelled(call), options, chunks))

    def backward(call: Call, options: Options, outputs: Outputs, bar: Outputs) -> Call:
        outputs, bar = outputs_by(there, outputs), outputs_by(there, bar)
        chunks = chunks_of(call)
        grads = implementation.backward(travelled(call), options, outputs, bar, chunks)
        scatter = lambda x: (
            None if x is None else lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)
        )
        return Call(
            q=back(grads.q, 1),
            k=scatter(grads.k),
            v=scatter(grads.v),
            g=back(grads.g, 1),
            h=scatter(grads.h),
            scores=jax.tree.map(lambda x: lax.psum(x, axis), grads.scores),
        )

    return Implementation(forward, backward, implementation.obstacle)


def balanced(devices: int, length: int, device: int | jax.Array) -> Chunks:
    """Return the chunks r and 2n−1−r of every device r.

    The even one is first: it comes from the first half of a device's array.
    """
    pair = lambda r: sorted((r, 2 * devices - 1 - r), key=lambda chunk: chunk % 2)
    starts = tuple(tuple(chunk * length for chunk in pair(r)) for r in range(devices))
    return Chunks(starts, length, device)


def _travel(x, dim: int, axis, devices: int, home: bool = False):
    """Exchange this device's chunks 2r and 2r+1 for the even and the odd one of r and 2n−1−r.

    `home` reverses the exchange.
    """
    worker = lambda chunk: min(chunk, 2 * devices - 1 - chunk)
    halves = np.split(np.arange(x.shape[dim]), 2)
    moved = []
    for parity, half in enumerate(halves):
        route = [(r, worker(2 * r + parity)) for r in range(devices)]
        route = [(b, a) for a, b in route] if home else route
        part = lax.slice_in_dim(x, int(half[0]), int(half[-1]) + 1, axis=dim)
        moved.append(lax.ppermute(part, axis, route))
    return lax.concatenate(moved, dim)

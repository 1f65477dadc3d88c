"""Attention with its positions split over devices: each has some queries, and all keys.

Device r of n holds the positions r·J/n … of its arrays. Of 2n chunks of the sequence it would then
own 2r and 2r+1, and the last device would do most of the causal work. So for attention the chunks
travel to the devices that work for them (`chunks`), and o travels back. Keys and h are gathered by
the caller, once for all steps.

Here is what one device does, inside a shard_map; `axis` is the mesh axis, or several, and `compute`
an implementation's forward or backward function, which takes the chunks too.

Shapes: B batch · J positions, P those of one device · K heads · R head dim · n devices.
"""

import numpy as np
from jax import lax

from cem_jax.kernels.call import Inputs, Plan
from cem_jax.kernels.chunks import Chunks, balanced


def forward(compute, inputs: Inputs, plan: Plan, *, axis, devices: int):
    """(lse [B, K, P], o [B, P, K, R], a) of the queries that this device holds."""
    chunks = _chunks(inputs, axis, devices)
    lse, o, a = compute(_travelled(inputs, axis, devices), plan, chunks)
    back = lambda x, dim: None if x is None else _travel(x, dim, axis, devices, home=True)
    return back(lse, 2), back(o, 1), back(a, 1)


def backward(
    compute, inputs: Inputs, plan: Plan, lse, o, a, cotangents, *, axis, devices: int
) -> Inputs:
    """Gradients: of q and g for this device's positions, and so of k, v and h, summed up."""
    there = lambda x, dim: None if x is None else _travel(x, dim, axis, devices)
    outputs = lambda lse, o, a: (there(lse, 2), there(o, 1), there(a, 1))
    grads = compute(
        _travelled(inputs, axis, devices),
        plan,
        *outputs(lse, o, a),
        outputs(*cotangents),
        _chunks(inputs, axis, devices),
    )
    back = lambda x: None if x is None else _travel(x, 1, axis, devices, home=True)
    scatter = lambda x: (
        None if x is None else lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)
    )
    total = lambda x: None if x is None else lax.psum(x, axis)
    return Inputs(
        q=back(grads.q),
        k=scatter(grads.k),
        v=scatter(grads.v),
        g=back(grads.g),
        h=scatter(grads.h),
        slopes=total(grads.slopes),
        self_bias=total(grads.self_bias),
        segments=None,
    )


def obstacle(positions: int, devices: int) -> str | None:
    """Why so many positions cannot be split so."""
    if positions % (2 * devices):
        return f"{positions} positions do not divide into two chunks for each of {devices} devices"
    return None


def _chunks(inputs: Inputs, axis, devices: int) -> Chunks:
    return balanced(devices, inputs.q.shape[1] // 2, lax.axis_index(axis))


def _travelled(inputs: Inputs, axis, devices: int) -> Inputs:
    there = lambda x: None if x is None else _travel(x, 1, axis, devices)
    return inputs._replace(q=there(inputs.q), g=there(inputs.g))


def _travel(x, dim: int, axis, devices: int, home: bool = False):
    """This device's two chunks, 2r and 2r+1, exchanged for its even and its odd one of r, 2n−1−r.

    `home`: the way back.
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

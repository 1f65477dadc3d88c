"""Attention with its positions split over devices: each has some queries, and all keys.

Device r of n holds the positions r·J/n … of its arrays. Of 2n chunks of the sequence it would then
own 2r and 2r+1, and the last device would do most of the causal work. So for attention the chunks
travel: device r works for the queries of chunks r and 2n−1−r, which is the same number of tiles on
every device, and o travels back. Keys and h are gathered by the caller, once for all steps.

Here is what one device does, inside a shard_map; `axis` is the mesh axis, or several.

Shapes: B batch · J positions, P those of one device · K heads · R head dim · n devices.
"""

import numpy as np
from jax import lax

from cem_jax.kernels import blockwise
from cem_jax.kernels.blockwise import Window
from cem_jax.kernels.inputs import Inputs, Plan


def forward(inputs: Inputs, plan: Plan, *, axis, devices: int):
    """(lse [B, K, P], o [B, P, K, R], a) of the queries that this device holds."""
    plan, window = _window(inputs, plan, axis, devices)
    lse, o, a = blockwise.forward(_travelled(inputs, axis, devices), plan, window)
    back = lambda x, dim: None if x is None else _travel(x, dim, axis, devices, home=True)
    return back(lse, 2), back(o, 1), back(a, 1)


def backward(inputs: Inputs, plan: Plan, lse, o, a, cotangents, *, axis, devices: int) -> Inputs:
    """Gradients: of q and g for this device's positions, and so of k, v and h, summed up."""
    plan, window = _window(inputs, plan, axis, devices)
    there = lambda x, dim: None if x is None else _travel(x, dim, axis, devices)
    outputs = lambda lse, o, a: (there(lse, 2), there(o, 1), there(a, 1))
    grads = blockwise.backward(
        _travelled(inputs, axis, devices),
        plan,
        *outputs(lse, o, a),
        outputs(*cotangents),
        window,
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


def _window(inputs: Inputs, plan: Plan, axis, devices: int) -> tuple[Plan, Window]:
    """The tiles of this device, and the plan with blocks that divide its chunks."""
    chunk = inputs.q.shape[1] // 2
    limit = min(plan.blocks) if plan.blocks else blockwise.default_blocks(inputs.k.shape[1])[0]
    block = max(size for size in range(1, min(limit, chunk) + 1) if chunk % size == 0)
    starts, tiles = map(
        np.stack,
        zip(*(_device_tiles(r, devices, chunk, block) for r in range(devices)), strict=True),
    )
    mine = lax.axis_index(axis)
    pick = lambda table: lax.dynamic_index_in_dim(table, mine, keepdims=False)
    window = Window(pick(starts), pick(tiles))
    return plan._replace(blocks=(block, block)), window


def _device_tiles(r: int, devices: int, chunk: int, block: int):
    """First positions of a device's query blocks [X], and its tiles [·, 2]."""
    chunks = sorted((r, 2 * devices - 1 - r), key=lambda c: c % 2)  # the even one first
    starts = [c * chunk + offset for c in chunks for offset in range(0, chunk, block)]
    tiles = [(x, y) for x, start in enumerate(starts) for y in range(start // block + 1)]
    return np.array(starts, np.int32), np.array(tiles, np.int32)

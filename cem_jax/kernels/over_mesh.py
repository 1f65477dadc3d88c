"""Attention under a mesh: each device computes its own rows, heads and positions.

XLA cannot split a kernel by itself, so `forward_over_mesh` and `backward_over_mesh` wrap it in a
shard_map over the mesh in use (`jax.set_mesh`). The axes are known by name; an axis of another
name, or of size 1, is ignored. Arrays that all heads share (g, h, a) are copies on the devices of a
row, and their gradients are summed over these devices; so are the gradients of the scores' biases
over the batch. What split positions need besides is in `context`.

Shapes: B batch · J positions · K heads · R head dim · D model dim.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cem_jax.kernels.call import Inputs, Plan
from cem_jax.sharding.layout import Split, split_in_use


def share(inputs: Inputs, split: Split) -> Inputs | str:
    """Shapes of one device's part of `inputs`, or what does not divide."""
    batch, positions, heads, _ = inputs.q.shape
    for what, size, dim in (
        ("sequences", batch, "batch"),
        ("heads", heads, "heads"),
        ("positions", positions, "sequence"),
    ):
        if size % split.ways(dim):
            axes = " × ".join(split.axes(dim))
            return f"{size} {what} do not divide over the {split.ways(dim)} devices of {axes}"

    def part(x, dims):
        ways = [1 if dim is None else split.ways(dim) for dim in dims]
        ways += [1] * (x.ndim - len(dims))
        shape = tuple(size // n for size, n in zip(x.shape, ways, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    pairs = zip(inputs, _input_dims(inputs), strict=True)
    return Inputs(*(None if x is None else part(x, dims) for x, dims in pairs))


# What is split of each array's leading dimensions. Keys are whole on every device.
_ROWS, _HEADS, _KEYS = ("batch",), ("heads",), ("batch", None, "heads")
_ROWS_PLACED, _PLACED = ("batch", "sequence"), ("batch", "sequence", "heads")


def _input_dims(inputs: Inputs) -> Inputs:
    per_head = inputs.g is not None and inputs.g.ndim == inputs.q.ndim
    g = _PLACED if per_head else _ROWS_PLACED
    return Inputs(_PLACED, _KEYS, _KEYS, g, _ROWS, _HEADS, _HEADS, _ROWS)


def _input_specs(inputs: Inputs, split: Split) -> Inputs:
    pairs = zip(inputs, _input_dims(inputs), strict=True)
    return Inputs(*(None if x is None else split.spec(*dims) for x, dims in pairs))


def _output_specs(plan: Plan, split: Split):
    a = {"none": (), "summed": _ROWS_PLACED, "per_head": _PLACED}[plan.context]
    return tuple(split.spec(*dims) for dims in (("batch", "heads", "sequence"), _PLACED, a))


def _gradient_specs(inputs: Inputs, split: Split) -> Inputs:
    """Those of the inputs, but keys' gradients come summed, each device with its positions."""
    specs = _input_specs(inputs, split)
    placed = lambda spec, dims: None if spec is None else split.spec(*dims)
    return specs._replace(
        k=placed(specs.k, _PLACED),
        v=placed(specs.v, _PLACED),
        h=placed(specs.h, _ROWS_PLACED),
        segments=None,
    )


def _sum(x, axes: tuple[str, ...]):
    """Summed over `axes`, in float32 at least."""
    if x is None or not axes:
        return x
    return lax.psum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axes).astype(x.dtype)


def forward_over_mesh(forward, plan: Plan):
    """`forward(inputs, plan)` on each device's part."""
    split = split_in_use()
    if not split:
        return lambda inputs: forward(inputs, plan)

    def local(inputs):
        lse, o, a = forward(inputs, plan)
        return lse, o, _sum(a, split.axes("heads")) if plan.context == "summed" else a

    return lambda inputs: jax.shard_map(
        local,
        in_specs=(_input_specs(inputs, split),),
        out_specs=_output_specs(plan, split),
        check_vma=False,  # what is summed over which axis is written out above
    )(inputs)


def backward_over_mesh(backward, plan: Plan):
    """`backward(inputs, plan, …)` on each device's part, with the sums between devices."""
    split = split_in_use()
    if not split:
        return lambda inputs, *rest: backward(inputs, plan, *rest)

    def local(inputs, *rest):
        grads = backward(inputs, plan, *rest)
        shared_g = grads.g is not None and grads.g.ndim < grads.q.ndim
        return grads._replace(
            g=_sum(grads.g, split.axes("heads")) if shared_g else grads.g,
            h=_sum(grads.h, split.axes("heads")),
            slopes=_sum(grads.slopes, split.axes("batch")),
            self_bias=_sum(grads.self_bias, split.axes("batch")),
        )

    def mapped(inputs, lse, o, a, cotangents):
        outputs = _output_specs(plan, split)
        return jax.shard_map(
            local,
            in_specs=(_input_specs(inputs, split), *outputs, outputs),
            out_specs=_gradient_specs(inputs, split),
            check_vma=False,
        )(inputs, lse, o, a, cotangents)

    return mapped

"""Attention under a mesh: each device computes its own rows, heads and positions.

XLA cannot split a kernel by itself, so `over_mesh` wraps it in a shard_map over the mesh in use
(`jax.set_mesh`). Arrays that all heads share (g, h, a) are copies on the devices of a row, and
their gradients are summed over these devices; so are the gradients of the scores' biases over the
batch. `split_positions` adds what split positions need.

Shapes: B batch · J positions · K heads · R head dim · D model dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from cem_jax.kernels import split_positions
from cem_jax.kernels.call import BIASES, Call, Implementation, Options, Outputs, Scores
from cem_jax.sharding.layout import Split, split_in_use

# How each array's leading dimensions are split.
_KEYS = ("batch", None, "heads")  # whole on every device
_HEADS = ("batch", "sequence", "heads")
_SHARED = ("batch", "sequence")


def over_mesh(implementation: Implementation) -> Implementation:
    """Return an implementation that runs on each device's part and sums between devices."""
    split = split_in_use()
    if not split:
        return implementation
    if split.ways("sequence") > 1:
        implementation = split_positions.exchanging(
            implementation, axis=split.axes("sequence"), devices=split.ways("sequence")
        )

    def forward(call: Call, options: Options) -> Outputs:
        def local(call):
            outputs = implementation.forward(call, options)
            if options.average != "summed":
                return outputs
            return outputs._replace(a=_sum(outputs.a, split.axes("heads")))

        return jax.shard_map(
            local,
            in_specs=(_specs(call, split),),
            out_specs=_output_specs(options, split),
            check_vma=False,  # the sums over each axis are explicit above
        )(call)

    def backward(call: Call, options: Options, outputs: Outputs, bar: Outputs) -> Call:
        def local(call, outputs, bar):
            grads = implementation.backward(call, options, outputs, bar)
            sums = {name: _sum(getattr(grads.scores, name), split.axes("batch")) for name in BIASES}
            return grads._replace(
                g=grads.g if call.per_head else _sum(grads.g, split.axes("heads")),
                h=_sum(grads.h, split.axes("heads")),
                scores=grads.scores._replace(**sums),
            )

        specs = _output_specs(options, split)
        return jax.shard_map(
            local,
            in_specs=(_specs(call, split), specs, specs),
            out_specs=_gradient_specs(call, split),
            check_vma=False,
        )(call, outputs, bar)

    def obstacle(call: Call, options: Options) -> str | None:
        return undivided(call, split) or implementation.obstacle(share(call, split), options)

    return Implementation(forward, backward, obstacle)


def undivided(call: Call, split: Split) -> str | None:
    """Return why `call` does not divide over the devices; None if it does."""
    batch, positions, heads, _ = call.q.shape
    places = split.ways("sequence")
    if places > 1 and positions % (2 * places):
        return f"{positions} positions do not divide into two chunks for each of {places} devices"
    for what, size, dim in (("sequences", batch, "batch"), ("heads", heads, "heads")):
        if size % split.ways(dim):
            axes = " × ".join(split.axes(dim))
            return f"{size} {what} do not divide over the {split.ways(dim)} devices of {axes}"
    return None


def share(call: Call, split: Split) -> Call:
    """Return the shapes of one device's part of `call`."""

    def part(x, dims):
        ways = [1 if dim is None else split.ways(dim) for dim in dims]
        ways += [1] * (x.ndim - len(dims))
        shape = tuple(size // n for size, n in zip(x.shape, ways, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return _by_dims(call, part)


def _by_dims(call: Call, of: Callable) -> Call:
    """Return `of(array, names of its dimensions)` for every array present."""
    give = lambda x, *dims: None if x is None else of(x, dims)
    biases = {name: give(getattr(call.scores, name), "heads") for name in BIASES}
    return Call(
        q=give(call.q, *_HEADS),
        k=give(call.k, *_KEYS),
        v=give(call.v, *_KEYS),
        g=give(call.g, *(_HEADS if call.per_head else _SHARED)),
        h=give(call.h, "batch"),
        scores=Scores(**biases, segments=give(call.scores.segments, "batch")),
    )


def _specs(call: Call, split: Split) -> Call:
    return _by_dims(call, lambda _, dims: split.spec(*dims))


def _gradient_specs(call: Call, split: Split) -> Call:
    """Return the call's specs, but with gradients of keys summed and split by position."""
    specs = _specs(call.floating, split)
    placed = lambda spec, *dims: None if spec is None else split.spec(*dims)
    return specs._replace(
        k=placed(specs.k, *_HEADS), v=placed(specs.v, *_HEADS), h=placed(specs.h, *_SHARED)
    )


def _output_specs(options: Options, split: Split) -> Outputs:
    a = {"none": PartitionSpec(), "summed": split.spec(*_SHARED), "per_head": split.spec(*_HEADS)}
    return Outputs(
        lse=split.spec("batch", "heads", "sequence"),
        o=split.spec(*_HEADS),
        a=a[options.average],
    )


def _sum(x, axes: tuple[str, ...]):
    """Sum over `axes`, in float32 or better."""
    if x is None or not axes:
        return x
    return lax.psum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axes).astype(x.dtype)

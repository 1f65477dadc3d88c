"""The device mesh, and the one table that says how every array is split over it.

Model code names each dimension of a parameter ("embed", "heads", …); LOGICAL_RULES maps these
names to mesh axes; everything else (parameters, optimizer moments, the batch) follows from that.

Mesh axes:
    data       batch rows; parameters are copied
    fsdp       batch rows too; parameters and optimizer state are split, gathered when used
    tensor     heads, MLP width and vocabulary are split
    context    positions are split
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cem_jax.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor", "context")

LOGICAL_RULES: dict[str, tuple[str, ...]] = {
    # parameters
    "layers": (),
    "embed": ("fsdp",),  # D
    "heads": ("tensor",),  # K
    "head_dim": (),  # R
    "mlp": ("tensor",),  # M
    "vocab": ("tensor",),  # V
    "rank": (),  # of the preconditioner's low-rank part
    # activations
    "batch": ("data", "fsdp"),  # B
    "sequence": ("context",),  # J
}

Axes = tuple[str | None, ...]  # one logical name, or None, for each dimension


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of all `devices` (default: all there are), in an order that suits their links.

    Slices of TPUs exchange by the data-center network, which is slow: the data axis crosses it, or
    fsdp where data cannot, and no other.

    Args:
      sizes: devices along each of MESH_AXES; an axis left out has size 1, and one may be -1:
        what the others leave.

    Raises:
      UserError: the sizes do not multiply out to the number of devices, or no axis that may divides
        over the slices.
    """
    devices = jax.devices() if devices is None else devices
    shape = resolve_sizes(sizes, len(devices))
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    slices = len({slice_of(device) for device in devices})
    if slices > 1:
        return Mesh(_over_slices(shape, slices, devices), MESH_AXES, axis_types=kinds)
    return jax.make_mesh(shape, MESH_AXES, axis_types=kinds, devices=devices)


def slice_of(device: jax.Device) -> int:
    """The slice of TPUs that a device belongs to; 0 where there are none."""
    return getattr(device, "slice_index", 0)


def _over_slices(shape: Sequence[int], slices: int, devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices in the mesh's shape, slices apart along one axis."""
    for index in map(MESH_AXES.index, ("data", "fsdp")):
        if shape[index] % slices == 0:
            far = [slices if i == index else 1 for i in range(len(shape))]
            near = [size // count for size, count in zip(shape, far, strict=True)]
            return mesh_utils.create_hybrid_device_mesh(near, far, devices)
    data, fsdp = shape[:2]
    raise UserError(
        f"mesh: of data = {data} and fsdp = {fsdp} neither divides over the {slices} slices; the "
        "data-center network between them is for these axes only"
    )


def resolve_sizes(sizes: Mapping[str, int], count: int) -> tuple[int, ...]:
    """Devices along each of MESH_AXES, of `count`. Raises UserError as `make_mesh` does."""
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    faults = [f"mesh.{axis}: no such axis" for axis in sizes if axis not in MESH_AXES]
    faults += [
        f"mesh.{axis}: must be a positive number, or -1 for what is left, not {size}"
        for axis, size in sizes.items()
        if size != -1 and size < 1
    ]
    open_axes = [axis for axis in MESH_AXES if sizes.get(axis, 1) == -1]
    if len(open_axes) > 1:
        faults.append(f"mesh: only one axis may be -1, not {' and '.join(open_axes)}")
    if faults:
        raise UserError(*faults)
    product = 1
    for axis in MESH_AXES:
        product *= max(sizes.get(axis, 1), 1)
    if count % product or (not open_axes and count != product):
        needed = f"a multiple of {product}" if open_axes else str(product)
        noun = "device" if needed == "1" else "devices"
        raise UserError(
            f"mesh: {shown} needs {needed} {noun}; there {'is' if count == 1 else 'are'} {count}"
        )
    return tuple(
        count // product if axis in open_axes else sizes.get(axis, 1) for axis in MESH_AXES
    )


def in_mesh(mesh: Mesh, function: Callable) -> Callable:
    """`function`, called with `mesh` in use: what it traces may ask which axes there are."""

    @wraps(function)
    def call(*args):
        with jax.set_mesh(mesh):
            return function(*args)

    return call


def spec_for(axes: Axes) -> PartitionSpec:
    """The partition of an array whose dimensions are named `axes`.

    A mesh axis splits one dimension at most: the first that asks for it gets it.

    Raises:
      ValueError: a name is not in LOGICAL_RULES.
    """
    used: set[str] = set()
    parts: list[str | tuple[str, ...] | None] = []
    for name in axes:
        if name is not None and name not in LOGICAL_RULES:
            raise ValueError(f"unknown logical axis {name!r}; known: {', '.join(LOGICAL_RULES)}")
        wanted = () if name is None else LOGICAL_RULES[name]
        free = tuple(axis for axis in wanted if axis not in used)
        used.update(free)
        parts.append(None if not free else free[0] if len(free) == 1 else free)
    return PartitionSpec(*parts)


def shardings(mesh: Mesh, axes_tree: Any) -> Any:
    """A tree of NamedSharding for a tree whose leaves are tuples of logical names."""
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, spec_for(axes)), axes_tree, is_leaf=_is_axes
    )


def _is_axes(node: Any) -> bool:
    return type(node) is tuple and all(name is None or isinstance(name, str) for name in node)


def replicated(mesh: Mesh) -> NamedSharding:
    """A full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of token windows [B, J+1]: rows are split. J+1 is not J, so positions are split later."""
    return NamedSharding(mesh, spec_for(("batch",)))


def optimizer_shardings(mesh: Mesh, opt_state: Any, params: Any, param_shardings: Any) -> Any:
    """Shardings of an optimizer's state, from those of the parameters.

    Optimizers keep copies of the parameter tree (moments, accumulated gradients), whole or with
    holes. A leaf whose path ends in a parameter's path and that has its shape lies as that
    parameter does; everything else (counters, factored moments) is copied to every device.

    Args:
      opt_state: the state's tree, abstract (jax.eval_shape of the optimizer's init) or real.
      params: the parameters' tree, abstract or real.
      param_shardings: a NamedSharding for each parameter.
    """
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    known = {
        (path, leaf.shape): sharding
        for (path, leaf), sharding in zip(paths, jax.tree.leaves(param_shardings), strict=True)
    }

    def place(path: tuple, leaf: Any) -> NamedSharding:
        endings = (path[start:] for start in range(len(path) + 1))  # the longest first
        found = (known[end, leaf.shape] for end in endings if (end, leaf.shape) in known)
        return next(found, replicated(mesh))

    return jax.tree_util.tree_map_with_path(place, opt_state)


def validate(
    mesh: Mesh,
    parameters: Mapping[str, tuple[Sequence[int], Axes]],
    *,
    global_batch: int,
    context: int,
    microbatch: int | None = None,
) -> None:
    """Refuse what does not divide: JAX would copy such an array to every device without a word.

    Args:
      parameters: shape and logical names of each, by name.
      global_batch, microbatch: rows of an update, and of one accumulation step.
      context: J, positions of a window.

    Raises:
      UserError: one line for each dimension at fault, with the nearest sizes that divide.
    """
    arrays = {
        "train.global_batch": ((global_batch,), ("batch",)),
        "data.context": ((context,), ("sequence",)),
        **({"train.microbatch": ((microbatch,), ("batch",))} if microbatch else {}),
        **parameters,
    }
    faults = []
    for name, (shape, axes) in arrays.items():
        if len(shape) != len(axes):
            raise ValueError(f"{name}: shape {tuple(shape)} has not the dimensions {axes}")
        for index, (size, part) in enumerate(zip(shape, spec_for(axes), strict=True)):
            split = (part,) if isinstance(part, str) else part or ()
            ways = 1
            for axis in split:
                ways *= mesh.shape[axis]
            # attention gives each device an early and a late chunk: equal causal work
            chunks = 2 if name == "data.context" and ways > 1 else 1
            ways *= chunks
            if size % ways:
                where = f"{name} dimension {index} ({axes[index]})" if name in parameters else name
                faults.append(f"{where} = {size} {_advice(mesh, split, size, ways, chunks)}")
    if faults:
        raise UserError(*faults)


def _advice(mesh: Mesh, split: tuple[str, ...], size: int, ways: int, chunks: int) -> str:
    below = size // ways * ways
    near = f"{below} and {below + ways}" if below else f"{ways}"
    over = " × ".join(f"mesh.{axis} = {mesh.shape[axis]}" for axis in split)
    over += f" × {chunks} chunks each" if chunks > 1 else ""
    return f"does not divide over {over}; nearest that do: {near}"

"""The device mesh, and the shardings of parameters, optimizer state and batch over it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from cem_jax.errors import UserError
from cem_jax.sharding.axes import BETWEEN_SLICES, MESH_AXES, ways
from cem_jax.sharding.divide import resolve_sizes
from cem_jax.sharding.layout import spec_for


def require_devices() -> None:
    """Raise UserError if JAX_PLATFORMS names an unavailable platform; list the available ones."""
    asked = jax.config.jax_platforms
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for CUDA without its plugin
        if not asked:
            raise
        jax.config.update("jax_platforms", None)
        try:
            found = jax.default_backend()
        finally:
            jax.config.update("jax_platforms", asked)
        reason = str(error).partition(" (set JAX_PLATFORMS")[0]
        why = f" ({reason})" if reason else ""
        raise UserError(
            f"JAX_PLATFORMS={asked}: JAX finds no such device here, only {found}{why}; unset the "
            f"variable, set it to {found}, or install the driver and JAX's plugin for that device"
        ) from None


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make the mesh of all `devices` (default: all available), ordered to suit their links.

    TPU slices communicate over the slow data-center network. Only the axes in `BETWEEN_SLICES` may
    cross it; the first that can does.

    Args:
      sizes: devices along each of MESH_AXES; an omitted axis has size 1, and one may be -1,
        for the remaining devices.

    Raises:
      UserError: the product of the sizes is not the number of devices, or no axis that may cross
        slices divides over them.
    """
    devices = jax.devices() if devices is None else devices
    shape = resolve_sizes(sizes, len(devices))
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    slices = len({slice_of(device) for device in devices})
    if slices > 1:
        return Mesh(_over_slices(shape, slices, devices), MESH_AXES, axis_types=kinds)
    return jax.make_mesh(shape, MESH_AXES, axis_types=kinds, devices=devices)


def slice_of(device: jax.Device) -> int:
    """Return the TPU slice that a device belongs to; 0 if there are no slices."""
    return getattr(device, "slice_index", 0)


def _over_slices(shape: Sequence[int], slices: int, devices: Sequence[jax.Device]) -> np.ndarray:
    """Return the devices in the mesh's shape, with slices separated along one axis."""
    crossing = {axis: shape[MESH_AXES.index(axis)] for axis in BETWEEN_SLICES}
    for index in map(MESH_AXES.index, crossing):
        if shape[index] % slices == 0:
            far = [slices if i == index else 1 for i in range(len(shape))]
            near = [size // count for size, count in zip(shape, far, strict=True)]
            return mesh_utils.create_hybrid_device_mesh(near, far, devices)
    named = " and ".join(f"mesh.{axis} {size}" for axis, size in crossing.items())
    raise UserError(
        f"mesh: of {named} none is a multiple of the {slices} slices; only these axes may "
        "cross the data-center network between slices"
    )


def usual_meshes(count: int, given: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield meshes of `count` devices worth trying, with positions split as in the `given` sizes.

    All devices along data or along fsdp, then fsdp beside small sizes of tensor.
    """
    context = max(1, given.get("context", 1))
    rest = count // context
    splits = [{"data": rest}] + [
        {"fsdp": rest // tensor, "tensor": tensor} for tensor in (1, 2, 4, 8) if rest % tensor == 0
    ]
    seen = []
    for split in splits:
        sizes = dict.fromkeys(MESH_AXES, 1) | split | {"context": context}
        if sizes not in seen:
            seen.append(sizes)
            yield sizes


def in_mesh(mesh: Mesh, function: Callable) -> Callable:
    """Wrap `function` to run with `mesh` in use, so that tracing sees the mesh axes."""

    @wraps(function)
    def call(*args):
        with jax.set_mesh(mesh):
            return function(*args)

    return call


def shardings(mesh: Mesh, axes_tree: Any) -> Any:
    """Return a tree of NamedSharding for a tree whose leaves are tuples of logical names."""
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, spec_for(axes)), axes_tree, is_leaf=_is_axes
    )


def _is_axes(node: Any) -> bool:
    return type(node) is tuple and all(name is None or isinstance(name, str) for name in node)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_ways(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of devices that a batch's rows are split over."""
    return ways(mesh.shape, "batch")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of token windows [B, J+1]: only rows are split.

    Positions are split inside the step, where there are J.
    """
    return NamedSharding(mesh, spec_for(("batch",)))


def optimizer_shardings(mesh: Mesh, opt_state: Any, params: Any, param_shardings: Any) -> Any:
    """Derive the shardings of an optimizer's state from those of the parameters.

    Optimizers keep copies of the parameter tree (moments, accumulated gradients), whole or with
    holes. A leaf whose path ends in a parameter's path, and which has its shape, is sharded like
    that parameter; everything else (counters, factored moments) is copied to every device.

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
        endings = (path[start:] for start in range(len(path) + 1))  # longest first
        found = (known[end, leaf.shape] for end in endings if (end, leaf.shape) in known)
        return next(found, replicated(mesh))

    return jax.tree_util.tree_map_with_path(place, opt_state)

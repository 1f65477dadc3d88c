"""The mesh of a configuration, and how state, batch and step are laid out over it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from cem_jax.config import Config, mesh_sizes, split_sizes
from cem_jax.distributed.session import global_arrays, together
from cem_jax.errors import UserError
from cem_jax.kernels import Unavailable
from cem_jax.model import pure
from cem_jax.sharding.divide import undivided
from cem_jax.sharding.mesh import (
    batch_sharding,
    batch_ways,
    in_mesh,
    make_mesh,
    optimizer_shardings,
    replicated,
    shardings,
)
from cem_jax.train.loss import sum_of_losses
from cem_jax.train.step import TrainState, initial_state, make_train_step


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """Shape, dtype and sharding of everything in the state."""
    axes = jax.tree.map(lambda info: info.axes, pure.describe(config.model), is_leaf=pure.is_info)
    abstract = jax.eval_shape(lambda: initial_state(config))
    params = shardings(mesh, axes)
    everywhere = replicated(mesh)
    placed = TrainState(
        params,
        optimizer_shardings(mesh, abstract.opt_state, abstract.params, params),
        everywhere,
        everywhere,
        everywhere,
    )
    with_sharding = lambda leaf, sharding: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding
    )
    return jax.tree.map(with_sharding, abstract, placed)


def fresh_state(config: Config, abstract: TrainState) -> TrainState:
    """Draw the state of step 0, laid out as `abstract`; each device makes its own part."""
    out = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    # Drawn once: on CPU, LLVM's optimiser would take seconds for what then runs in milliseconds;
    # and its vectors round otherwise than what is left of a loop: the bits would follow the mesh.
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    make = jax.jit(lambda: initial_state(config), out_shardings=out, compiler_options=quick)
    return together("the initial state", make)()


def jitted_step(
    config: Config, mesh: Mesh, state: TrainState, total_steps: int, ahead: float = 0.0
) -> Callable:
    """The training step as it runs and as it is compiled beforehand; to be traced `in_mesh`.

    `state`: abstract, with shardings; the step's own state is donated and comes back laid out so.
    """
    ways = batch_ways(mesh)
    step = make_train_step(config, total_steps, ways, ahead)
    out = (jax.tree.map(lambda leaf: leaf.sharding, state), None)
    return jax.jit(step, donate_argnums=0, out_shardings=out)


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of a batch as the loader makes it."""
    names = ("tokens", "segments") if config.data.document_mask else ("tokens",)
    shape = (config.train.global_batch, config.data.context + 1)
    array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    return dict.fromkeys(names, array)


def place_batch(batch: dict[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows of a batch, as part of the whole that is split over all devices."""
    return global_arrays(batch, batch_sharding(mesh))


def lay_out(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The configuration's mesh, over all devices of this machine if none are given.

    Raises UserError with what does not divide over it, or has no kernel on these devices.
    """
    mesh = make_mesh(mesh_sizes(config), devices)
    check_divides(config, mesh)
    _check_kernels(config, mesh)
    return mesh


def check_divides(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raise UserError with every field that does not divide over the mesh."""
    faults = undivided(split_sizes(config), mesh.shape, resolved=True)
    if faults:
        raise UserError(*faults)


def _check_kernels(config: Config, mesh: Mesh) -> None:
    """Traces the model where a fused kernel is demanded, which says whether there is one."""
    if config.model.attention.implementation != "pallas":
        return
    rows = config.train.microbatch or config.train.global_batch
    tokens = jax.ShapeDtypeStruct((rows, config.data.context + 1), jnp.int32)
    dtype = jnp.dtype(config.train.compute_dtype)
    loss = lambda parameters, tokens: sum_of_losses(
        pure.bind(config.model, parameters), tokens, dtype=dtype
    )
    try:
        in_mesh(mesh, jax.eval_shape)(loss, pure.abstract_parameters(config.model), tokens)
    except Unavailable as reason:
        raise UserError(f"model.attention.implementation: {reason}") from None

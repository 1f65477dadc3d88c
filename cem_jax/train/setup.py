"""The mesh of a configuration, and the layout of state, batch and step over it."""

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
    """Return the shape, dtype and sharding of everything in the state."""
    axes = jax.tree.map(lambda info: info.axes, pure.describe(config.model))
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
    """Return the state of step 0, laid out as `abstract`; each device draws its own part."""
    out = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    # Runs once: on CPU, LLVM's optimiser would take seconds to save milliseconds. Its vector code
    # also rounds differently from the scalar rest of a loop, so the bits would depend on the mesh.
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    make = jax.jit(lambda: initial_state(config), out_shardings=out, compiler_options=quick)
    return together("the initial state", make)()


def jitted_step(
    config: Config, mesh: Mesh, state: TrainState, total_steps: int, ahead: float = 0.0
) -> Callable:
    """Return the jitted training step, to run or to compile ahead of time; call it `in_mesh`.

    `state`: abstract, with shardings. The step donates its state and returns one laid out like it.
    """
    ways = batch_ways(mesh)
    step = make_train_step(config, total_steps, ways, ahead)
    out = (jax.tree.map(lambda leaf: leaf.sharding, state), None)
    return jax.jit(step, donate_argnums=0, out_shardings=out)


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape, dtype and sharding of a batch from the loader."""
    names = ("tokens", "segments") if config.data.document_mask else ("tokens",)
    shape = (config.train.global_batch, config.data.context + 1)
    array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    return dict.fromkeys(names, array)


def place_batch(batch: dict[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Return the global batch, split over all devices, to which this process gives its rows."""
    return global_arrays(batch, batch_sharding(mesh))


def lay_out(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the configuration's mesh over `devices`, by default all of this machine.

    Raises UserError if something does not divide over it, or has no kernel on these devices.
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
    """Raise UserError if a fused kernel is required but cannot run: tracing the model tells."""
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

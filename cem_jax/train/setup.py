"""Everything a run needs, checked before any of it starts or is written."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from cem_jax.config import Config, mesh_sizes, split_sizes
from cem_jax.data.dataset.checks import check_token_ids
from cem_jax.data.dataset.loader import TrainLoader
from cem_jax.data.dataset.mixture import Mixture, open_mixture, open_source, single
from cem_jax.distributed.session import global_arrays, local_rows, together
from cem_jax.errors import UserError
from cem_jax.kernels import Unavailable
from cem_jax.model import pure
from cem_jax.runs.jax_settings import configure_jax
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
from cem_jax.train.evaluator import Evaluator
from cem_jax.train.loss import sum_of_losses
from cem_jax.train.step import TrainState, initial_state, make_train_step


class Setup(NamedTuple):
    """A run that may start."""

    config: Config
    mixture: Mixture
    loader: TrainLoader
    evaluator: Evaluator
    mesh: Mesh
    state: TrainState  # abstract: shapes, dtypes and shardings


def prepare_run(config: Config) -> Setup:
    """Opens the data, lays the state over the devices. Raises UserError with what does not fit."""
    config.total_steps  # noqa: B018 - raises when the config does not say how long
    configure_jax(config)
    mixture = open_data(config)
    mesh = lay_out(config)
    loader = TrainLoader(
        mixture,
        context=config.data.context,
        global_batch=config.train.global_batch,
        seed=config.data.shuffle_seed,
        document_mask=config.data.document_mask,
        prefetch=config.data.prefetch,
        rows=local_rows(batch_sharding(mesh), config.train.global_batch),
    )
    evaluator = Evaluator(config, mixture, config.eval.split, limit=config.eval.batches, mesh=mesh)
    return Setup(config, mixture, loader, evaluator, mesh, abstract_state(config, mesh))


def open_data(config: Config) -> Mixture:
    """The dataset or mixture of the configuration, found to fit the model."""
    if config.data.mixture:
        mixture = open_mixture(config.data.mixture)
    elif config.data.path:
        mixture = single(open_source(config.data.path))
    else:
        raise UserError("data.path: not set; name a directory that `cem prepare` wrote")
    problems = []
    if mixture.separator != config.data.separator:
        problems.append(
            f"data.separator: {config.data.separator}, but the dataset was prepared with "
            f"{mixture.separator}"
        )
    if mixture.vocab_size > config.model.vocab_size:
        problems.append(
            f"model.vocab_size: {config.model.vocab_size} is smaller than the dataset's tokenizer, "
            f"{mixture.vocab_size}"
        )
    if problems:
        raise UserError(*problems)
    for dataset in mixture.sources:
        check_token_ids(dataset)
    return mixture


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


def fresh_state(setup: Setup) -> TrainState:
    """Step 0, each device making its own part."""
    out = jax.tree.map(lambda leaf: leaf.sharding, setup.state)
    # Drawn once: on CPU, LLVM's optimiser would take seconds for what then runs in milliseconds;
    # and its vectors round otherwise than what is left of a loop: the bits would follow the mesh.
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    make = jax.jit(lambda: initial_state(setup.config), out_shardings=out, compiler_options=quick)
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

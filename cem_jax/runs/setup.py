"""Set up everything that a run needs, checked before anything starts or is written."""

import os
import re
import warnings
from typing import NamedTuple

import jax

# Imported before any tracing: the import extends the key of JAX's caches, so that a function whose
# first call imports it, to consider a fused kernel, would be compiled twice.
import jax.experimental.pallas.tpu
from jax.sharding import Mesh

from cem_jax.config import Config
from cem_jax.data.dataset.checks import check_token_ids
from cem_jax.data.dataset.loader import TrainLoader
from cem_jax.data.dataset.mixture import Mixture, open_mixture, open_source, single
from cem_jax.distributed.session import local_rows
from cem_jax.errors import UserError
from cem_jax.runs.checkpoints import warn
from cem_jax.sharding.mesh import batch_sharding, require_devices
from cem_jax.storage.paths import cache_home
from cem_jax.train.evaluator import Evaluator
from cem_jax.train.setup import abstract_state, lay_out
from cem_jax.train.step import TrainState

_CACHE_FAILS = re.compile(
    r"Error (?:reading|writing) persistent compilation cache entry for '[^']*': "
)


class Setup(NamedTuple):
    """A run that is ready to start."""

    config: Config
    mixture: Mixture
    loader: TrainLoader
    evaluator: Evaluator
    mesh: Mesh
    state: TrainState  # abstract: shapes, dtypes and shardings


def prepare_run(config: Config) -> Setup:
    """Open the data and lay out the state over the devices. Raises UserError listing faults."""
    config.total_steps  # noqa: B018 - raises if the config sets no length
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


def configure_jax(config: Config) -> None:
    """Set the number width, the generator and the compile cache; call before any computation.

    Numbers have 64 bits only where the run computes in float64. JAX's variables change neither.
    """
    jax.config.update("jax_enable_x64", config.train.compute_dtype == "float64")
    jax.config.update("jax_threefry_partitionable", True)
    require_devices()
    _configure_cache(compile_cache(config))


def compile_cache(config: Config) -> str | None:
    """Return log.compile_cache, JAX_COMPILATION_CACHE_DIR or the user's default, or None."""
    named = config.log.compile_cache or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if named:
        return os.path.expanduser(named)
    home = cache_home()
    return None if home is None else str(home / "cem_jax" / "compile")


def _configure_cache(folder: str | None) -> None:
    """Keep compiled functions in `folder`; warn once if there is none or it cannot be written."""
    jax.config.update("jax_compilation_cache_dir", folder)
    if folder is None:
        warn("no home directory: compiled functions are not cached (log.compile_cache)")
        return
    show, told = warnings.showwarning, []

    def once(message, *args, **kwargs) -> None:
        if not (found := _CACHE_FAILS.match(str(message))):
            show(message, *args, **kwargs)
        elif not told:  # JAX repeats it for each function
            told.append(message)
            warn(f"compile cache {folder}: cannot be used: {str(message)[found.end() :]}")

    if getattr(show, "__name__", "") != once.__name__:
        warnings.showwarning = once


def open_data(config: Config) -> Mixture:
    """Open the configured dataset or mixture. Raises UserError if it does not fit the model."""
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

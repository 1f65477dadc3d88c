"""JAX's own settings, from a configuration; before the first computation."""

import os
from pathlib import Path

import jax

from cem_jax.config import Config


def configure_jax(config: Config) -> None:
    """Float64 where the run computes in it, and the persistent compile cache."""
    if config.train.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    cache = config.log.compile_cache or Path.home() / ".cache" / "cem_jax" / "compile"
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cache))

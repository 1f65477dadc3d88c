"""The configuration as frozen, validated dataclasses, built from a file and flags.

    schema    the fields, their types and ranges; loading a configuration
    rules     constraints between fields
    values    reading and checking one field's value
    names     suggestions for names that are not fields
    file      running a configuration file

`configs/base.py` says what each field means.
"""

from cem_jax.config.rules import mesh_sizes, split_sizes
from cem_jax.config.schema import (
    AttentionConfig,
    Config,
    MLPConfig,
    ModelConfig,
    OptimizerConfig,
    differences,
    fields,
    flattened,
    leaves,
    load_config,
    with_steps,
)

__all__ = [
    "AttentionConfig",
    "Config",
    "MLPConfig",
    "ModelConfig",
    "OptimizerConfig",
    "differences",
    "fields",
    "flattened",
    "leaves",
    "load_config",
    "mesh_sizes",
    "split_sizes",
    "with_steps",
]

"""The configuration as frozen, validated dataclasses, and how files and flags become one.

    schema    the fields, their types and ranges; loading a configuration
    rules     what must hold between fields
    values    how a field's value is read and checked
    names     which field may be meant by a name that is none
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

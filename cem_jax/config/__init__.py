"""The configuration as frozen, validated dataclasses, and how files and flags become one.

    schema    the fields, their types and ranges; loading a configuration
    rules     what must hold between fields
    values    how text becomes a field's value
    names     what may be meant by a name that is no field
    file      running a configuration file

`configs/base.py` says what each field means.
"""

from cem_jax.config.rules import mesh_sizes, split_sizes
from cem_jax.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    MLPConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    differences,
    fields,
    flattened,
    leaves,
    load_config,
    with_steps,
)

__all__ = [
    "AttentionConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "MLPConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "TrainConfig",
    "differences",
    "fields",
    "flattened",
    "leaves",
    "load_config",
    "mesh_sizes",
    "split_sizes",
    "with_steps",
]

"""The model as pure functions of a plain parameter tree.

A parameter tree is a nested dict of arrays: the form in which parameters are initialised, trained
and checkpointed.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from cem_jax.config import ModelConfig
from cem_jax.model.parameters import with_values
from cem_jax.model.transformer import Transformer

Parameters = dict[str, Any]


@dataclass(frozen=True)
class ParameterInfo:
    """Shape, dtype, axis names and decay of a parameter; a leaf to `jax.tree`."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]  # logical names of the dimensions
    decays: bool  # whether weight decay applies


def seeded(seed: int | jax.Array) -> jax.Array:
    """Return the threefry key of `seed`, below 2**32, whatever JAX's variables say.

    Another default generator, a seed offset and 64-bit integers would each make another key.
    """
    words = jnp.stack([jnp.zeros((), jnp.uint32), jnp.asarray(seed, jnp.uint32)])
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def initialise(config: ModelConfig, key: jax.Array) -> Parameters:
    """Return freshly drawn float32 parameters; under jit, the same on every mesh."""
    return nnx.to_pure_dict(nnx.state(_fresh(config, key), nnx.Param))


def bind(config: ModelConfig, parameters: Parameters) -> Transformer:
    """Return the model with these parameters; call it in a traced function."""
    return with_values(lambda: _fresh(config), parameters)


def describe(config: ModelConfig) -> dict[str, Any]:
    """Return a tree of ParameterInfo with the structure of the parameters."""

    def info(param: nnx.Param) -> ParameterInfo:
        axes = param.get_metadata("axes")
        stacked = len(param.shape) - len(axes)
        axes = ("layers",) * stacked + axes
        return ParameterInfo(tuple(param.shape), param.dtype, axes, param.get_metadata("decays"))

    abstract = nnx.eval_shape(lambda: _fresh(config))
    params = nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    return traverse_util.unflatten_dict({path: info(param) for path, param in params})


def count(config: ModelConfig) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_parameters(config)))


def abstract_parameters(config: ModelConfig) -> Any:
    """Return the shapes and dtypes of the parameters."""
    to_struct = lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype)
    return jax.tree.map(to_struct, describe(config))


def _fresh(config: ModelConfig, key: jax.Array | int = 0) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(params=key))

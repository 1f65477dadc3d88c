"""The model as pure functions of a plain parameter tree.

A parameter tree is a nested dict of arrays, the form in which parameters are initialised, trained
and checkpointed.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx

from cem_jax.config import ModelConfig
from cem_jax.model.parameters import with_values
from cem_jax.model.transformer import Transformer

Parameters = dict[str, Any]


class ParameterInfo(NamedTuple):
    """What is known of a parameter before it has a value."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]  # logical names of the dimensions
    decays: bool  # whether weight decay applies


def initialise(config: ModelConfig, key: jax.Array) -> Parameters:
    """Draw fresh parameters, float32; the same on every mesh when called under jit."""
    return nnx.to_pure_dict(nnx.state(_fresh(config, key), nnx.Param))


def bind(config: ModelConfig, parameters: Parameters) -> Transformer:
    """Return the model with these parameters, to be called within a traced function."""
    return with_values(lambda: _fresh(config), parameters)


def describe(config: ModelConfig) -> dict[str, Any]:
    """Return a tree like the parameters', of ParameterInfo."""
    described = {}
    abstract = nnx.eval_shape(lambda: _fresh(config))
    for path, param in nnx.to_flat_state(nnx.state(abstract, nnx.Param)):
        axes = param.get_metadata("axes")
        stacked = len(param.shape) - len(axes)
        info = ParameterInfo(
            tuple(param.shape),
            param.dtype,
            ("layers",) * stacked + axes,
            param.get_metadata("decays"),
        )
        branch = described
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = info
    return described


def is_info(node: Any) -> bool:
    """Return whether a node is a leaf of `describe`'s tree, for `jax.tree.map`."""
    return isinstance(node, ParameterInfo)


def count(config: ModelConfig) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_parameters(config)))


def abstract_parameters(config: ModelConfig) -> Any:
    """Return the shapes and dtypes of the parameters."""
    to_struct = lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype)
    return jax.tree.map(to_struct, describe(config), is_leaf=is_info)


def _fresh(config: ModelConfig, key: jax.Array | int = 0) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(params=key))

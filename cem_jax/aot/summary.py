"""Parameters, FLOPs and memory of a configuration, compared with its Llama twin.

Only the configuration is read; nothing is initialised or compiled, and arrays are abstract.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import AbstractMesh

from cem_jax.config import Config, ModelConfig, mesh_sizes
from cem_jax.model import pure
from cem_jax.sharding.axes import MESH_AXES
from cem_jax.sharding.divide import resolve_sizes
from cem_jax.sharding.layout import spec_for
from cem_jax.train.flops import folding_flops, forward_flops, training_flops_per_token
from cem_jax.train.loss import sum_of_losses
from cem_jax.train.setup import check_divides


class Parameter(NamedTuple):
    """An array of the parameter tree."""

    name: str  # dotted, as in checkpoints
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]

    @property
    def size(self) -> int:
        """Number of elements, over all layers."""
        return math.prod(self.shape)

    def bytes_on(self, mesh: AbstractMesh) -> int:
        """Return its bytes per device of the mesh."""
        ways = math.prod(mesh.shape[axis] for axes in self.partition for axis in axes)
        return self.size // ways * self.dtype.itemsize

    @property
    def partition(self) -> list[list[str]]:
        """Mesh axes that split each dimension."""
        parts = spec_for(self.axes)
        return [[] if p is None else [p] if isinstance(p, str) else list(p) for p in parts]


def summarise(config: Config, devices: int | None = None) -> dict[str, Any]:
    """Return what `cem inspect --json` prints. Memory is in bytes, over the whole mesh.

    Args:
      devices: number in the mesh; None: as few as the configuration allows.

    Raises:
      UserError: there is no such mesh, or something does not divide over it.
    """
    mesh = planned_mesh(config, devices)
    with jax.enable_x64(config.train.compute_dtype == "float64"):
        return figures(config.model, config) | {
            "parameters_by_module": {p.name: p.size for p in parameters_of(config.model)},
            "layers": config.model.layers,
            "memory": memory(config),
            "training": training(config),
            "llama_twin": figures(llama_twin(config.model), config),
            "mesh": dict(mesh.shape),
            "shardings": {
                p.name: {
                    "shape": list(p.shape),
                    "dtype": str(p.dtype),
                    "partition": p.partition,
                    "bytes_per_device": p.bytes_on(mesh),
                }
                for p in parameters_of(config.model)
            },
            "notes": notes(config.model),
        }


def planned_mesh(config: Config, devices: int | None) -> AbstractMesh:
    """Return the configuration's abstract mesh, checked as `cem train` does."""
    sizes = mesh_sizes(config)
    count = math.prod(abs(size) for size in sizes.values()) if devices is None else devices
    mesh = AbstractMesh(resolve_sizes(sizes, count), MESH_AXES)
    check_divides(config, mesh)
    return mesh


def figures(model: ModelConfig, config: Config) -> dict[str, Any]:
    """Return the figures by which a model and its twin are compared."""
    forward = forward_flops(model, config.data.context)
    return {
        "parameters": pure.count(model),
        "flops_per_token": int(forward.total),
        "flops_per_token_by_part": {part: int(n) for part, n in forward._asdict().items()},
        "training_flops_per_token": int(training_flops_per_token(model, config.data.context)),
        "folding_flops_per_pass": int(folding_flops(model)),
        "cache_bytes_per_token": cache_bytes_per_token(model, config.train.compute_dtype),
    }


def parameters_of(model: ModelConfig) -> Iterator[Parameter]:
    """Yield every parameter, in the tree's order."""
    described = pure.describe(model)
    for path, info in jax.tree_util.tree_leaves_with_path(described):
        name = ".".join(str(key.key) for key in path)
        yield Parameter(name, info.shape, jnp.dtype(info.dtype), info.axes)


def llama_twin(model: ModelConfig) -> ModelConfig:
    """Return the Llama of the same D, L, K, M and vocabulary."""
    attention = dataclasses.replace(
        model.attention,
        kind="llama",
        steps=1,
        position="rope",
        self_bias=False,
        tau="sqrt_head_dim",
    )
    mlp = dataclasses.replace(model.mlp, kind="gated", steps=1)
    return dataclasses.replace(model, attention=attention, mlp=mlp)


def cache_bytes_per_token(model: ModelConfig, dtype: str) -> int:
    """Return the bytes of the decoding cache per token, over all layers."""
    parameters = pure.abstract_parameters(model)
    cache = lambda p: pure.bind(model, p).cache(1, 1, jnp.dtype(dtype))
    return _bytes(jax.tree.leaves(jax.eval_shape(cache, parameters)))


def memory(config: Config) -> dict[str, int]:
    """Return the bytes of the training state and of what is kept for the backward pass."""
    parameters = _bytes(jax.tree.leaves(pure.abstract_parameters(config.model)))
    # with accumulation: the running sum, and the gradient of the microbatch
    gradients = parameters * (2 if config.train.accumulation > 1 else 1)
    parts = {
        "parameters": parameters,
        "optimizer": 2 * parameters,  # AdamW's two moments
        "gradients": gradients,
        "activations": _bytes(kept_for_backward(config)),
    }
    return parts | {"total": sum(parts.values())}


def kept_for_backward(config: Config) -> list[jax.core.ShapedArray]:
    """Return the arrays that JAX keeps from the forward to the backward pass of one microbatch.

    This estimates the activations' memory from the traced program: XLA may keep less, recomputing
    what is cheap, and needs additional working memory.
    """
    model, dtype = config.model, jnp.dtype(config.train.compute_dtype)
    rows = config.train.microbatch or config.train.global_batch
    tokens = jax.ShapeDtypeStruct((rows, config.data.context + 1), jnp.int32)

    def residuals(parameters, tokens):
        segments = tokens if config.data.document_mask else None
        loss = lambda p: (
            sum_of_losses(pure.bind(model, p), tokens, segments=segments, dtype=dtype).total
        )
        return jax.tree.leaves(jax.vjp(loss, parameters)[1])

    jaxpr = jax.make_jaxpr(residuals)(pure.abstract_parameters(model), tokens).jaxpr
    given = set(jaxpr.invars)
    kept = {v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in given}
    return [v.aval for v in kept]


def training(config: Config) -> dict[str, Any] | None:
    """Return the length of the run; None if the configuration does not set it."""
    if config.train.steps is None and config.train.tokens is None:
        return None
    steps = config.total_steps
    tokens = steps * config.tokens_per_step
    flops = tokens * training_flops_per_token(config.model, config.data.context)
    return {"steps": steps, "tokens": tokens, "flops": flops}


def notes(model: ModelConfig) -> list[str]:
    """Return remarks on the figures."""
    a, m = model.attention, model.mlp
    found = []
    if a.kind == "cem" and a.diagonal_in_update:
        if a.preconditioner != "none" and a.preconditioner_heads == "per_head":
            found.append(
                "one preconditioner per head and the diagonal in the update: averages of h are "
                f"kept per head, {a.heads} times the memory of a shared one"
            )
        elif a.diagonal == "per_head":
            found.append(
                "a diagonal per head in the update: averages of h are kept per head, "
                f"{a.heads} times the memory of a shared one"
            )
    if (a.kind == "cem" and a.steps > 1) or (m.kind == "cem" and m.steps > 1):
        found.append(
            "fewer parameters do not mean fewer FLOPs: every step computes with them again"
        )
    return found


def _bytes(arrays: Sequence[Any]) -> int:
    return sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in arrays)

"""How the layers descend their energies: the `energies` lines of metrics.jsonl (docs/metrics.md).

Computed apart from the training step, on a few sequences in float32, so that it costs nothing
unless it is used.

Shapes: B sequences · J positions · D model dim · L layers · T steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from cem_jax.config import Config, ModelConfig
from cem_jax.distributed.session import together
from cem_jax.energy import extreme_eigenvalues
from cem_jax.model import pure
from cem_jax.model.parameters import number
from cem_jax.model.sublayer import CEMSublayer
from cem_jax.sharding.mesh import batch_ways, in_mesh, replicated

SUBLAYERS = ("attention", "mlp")
_SEQUENCES = 4  # at least, if the batch has them; rounded up to a multiple of the row shards
_ROUNDING = 64  # an energy's rise counts only above this many units in the last place


def make_probe(config: Config, mesh: Mesh) -> Callable[[Any, Mapping[str, Array]], dict] | None:
    """Return a function (parameters, placed batch) -> the values of an `energies` line.

    All processes must call it. Returns None if no layer of the model has an energy.
    """
    if "cem" not in (config.model.attention.kind, config.model.mlp.kind):
        return None
    shards = batch_ways(mesh)

    def probe(parameters, batch):
        few = {name: _first_of_each(array, shards) for name, array in batch.items()}
        segments = few["segments"][:, :-1] if "segments" in few else None
        return measure(config.model, parameters, few["tokens"][:, :-1], segments)

    jitted = in_mesh(mesh, together("the energies", jax.jit(probe, out_shardings=replicated(mesh))))

    def values(parameters, batch):
        measured = jax.device_get(jitted(parameters, batch))
        rows = _each(batch["tokens"].shape[0], shards) * shards
        return {"sequences": rows} | jax.tree.map(lambda array: array.tolist(), measured)

    return values


def _each(rows: int, shards: int) -> int:
    """Return the number of sequences to use per shard: about `_SEQUENCES` in all."""
    return min(rows // shards, -(-_SEQUENCES // shards))


def _first_of_each(rows: Array, shards: int) -> Array:
    """Return the first rows of each shard, so that none moves to another device."""
    each = _each(rows.shape[0], shards)
    few = rows.reshape(shards, -1, *rows.shape[1:])[:, :each]
    return few.reshape(shards * each, *rows.shape[1:])


def measure(
    config: ModelConfig,
    parameters: pure.Parameters,
    tokens: Int[Array, "B J"],
    segments: Int[Array, "B J"] | None = None,
) -> dict[str, dict[str, Array]]:
    """Return {"attention": {field: [L, …]}, "mlp": …} for the sublayers that have an energy."""
    # unlike fused kernels, blockwise takes float32 at any head size on any platform
    attention = replace(config.attention, implementation="blockwise", block_sizes=None)
    model = pure.bind(replace(config, attention=attention), parameters)

    def look(block, x):
        seen = {}
        for name in SUBLAYERS:
            sublayer = getattr(block, name)
            inputs = {"segments": segments} if name == "attention" else {}
            if isinstance(sublayer, CEMSublayer):
                x, seen[name] = _descent(sublayer, x, inputs)
            else:
                x = sublayer(x, **inputs)
        return x, seen

    return model.watch(look, tokens)


def _descent(
    sublayer: CEMSublayer, x: Float[Array, "B J D"], inputs: dict[str, Any]
) -> tuple[Float[Array, "B J D"], dict[str, Array]]:
    """Return the state after the sublayer, and the statistics of its steps."""
    h = sublayer.context(x)
    states = sublayer.states(x, **inputs)
    updates = jnp.diff(states, axis=0)
    energy = lambda x: sublayer.energy(x, h, **inputs)

    def at(x):
        """Return energies and gradients; h is held, so each energy depends only on its token."""
        energies, pull_back = jax.vjp(energy, x)
        return energies, pull_back(jnp.ones_like(energies))[0]

    before, slopes = jax.lax.map(at, states[:-1])
    energies = jnp.concatenate([before, energy(states[-1])[None]])
    rise = jnp.diff(energies, axis=0)
    rounding = _ROUNDING * jnp.finfo(energies.dtype).eps * jnp.abs(before)
    norms = jnp.linalg.norm(updates, axis=-1)
    turns = (updates[1:] * updates[:-1]).sum(-1) / (norms[1:] * norms[:-1])
    mean = lambda values: values.mean((1, 2))
    seen = {
        "energy": mean(energies),
        "energy_change": mean(rise),
        "rise_fraction": mean(rise > rounding),
        "descent_ratio": mean(rise) / mean((slopes * updates).sum(-1)),
        "force_norm": mean(norms) / jnp.abs(number(sublayer.eta)),
        "cosine": mean(turns),
    }
    if hasattr(sublayer, "statistics"):
        seen |= jax.lax.map(lambda x: sublayer.statistics(x, h, **inputs), states[:-1])
    if sublayer.preconditioner is not None:
        smallest, largest = extreme_eigenvalues(sublayer.preconditioner.factors())
        seen |= {"smallest_eigenvalue": smallest.min(), "largest_eigenvalue": largest.max()}
    return states[-1], seen

"""Compile the training step, as `cem train` jits it, for devices that need not be present."""

import math
import re
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from cem_jax.aot.collectives import Collective, collectives
from cem_jax.aot.hlo import parse, runs
from cem_jax.aot.topology import Topology
from cem_jax.aot.traffic import bytes_moved
from cem_jax.config import Config
from cem_jax.errors import RunFailed
from cem_jax.sharding.mesh import in_mesh, slice_of
from cem_jax.train.setup import abstract_batch, abstract_state, jitted_step, lay_out
from cem_jax.train.step import TrainState

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = r"([\d.]+)([KMGT]?)"
# Messages of libtpu, current and older, for a program that is too large; the number is its total.
_TOO_LARGE = (
    re.compile(rf"total memory required for [\w ]+\({_NUMBER}\) exceeds available HBM"),
    re.compile(rf"Used {_NUMBER} of [\d.]+[KMGT]? hbm"),
)
_SOME_STEPS = 1000  # the schedule's length, a constant in the program: any number will do


class Compiled(NamedTuple):
    """The result of one compilation. Bytes are per device."""

    mesh: Mesh
    seconds: float
    memory: dict[str, Any]  # see `_memory`
    fits: bool
    bytes: int | None  # read from and written to main memory; None if nothing was compiled
    collectives: list[Collective] | None
    unread_loops: int  # loops with unknown trip counts, whose content counts once
    xla: dict[str, float]  # XLA's own cost analysis, which counts loops once


def compile_step(config: Config, topology: Topology) -> Compiled:
    """Lower and compile the step; one that is too large for its device has `fits` False.

    Raises UserError if the configuration does not fit the mesh, RunFailed with the compiler's
    message on other errors.
    """
    with jax.enable_x64(config.train.compute_dtype == "float64"):
        mesh = lay_out(config, topology.devices)
        state = abstract_state(config, mesh)
        known = state_memory(state)
        began = time.perf_counter()
        try:
            done = _compile(config, mesh, state, topology.platform)
        except jax.errors.JaxRuntimeError as error:
            needed = bytes_needed(str(error))
            if needed is None:
                raise RunFailed(f"the compiler for {topology.name} gave up: {error}") from None
            memory = _memory(known, None, needed, topology)
            seconds = time.perf_counter() - began
            return Compiled(mesh, seconds, memory, False, None, None, 0, {})
    seconds = time.perf_counter() - began
    memory = _memory(known, done.memory_analysis(), None, topology)
    program = parse(done.as_text())
    capacity = topology.capacity.memory
    return Compiled(
        mesh,
        seconds,
        memory,
        capacity is None or memory["total"] <= capacity,
        bytes_moved(program),
        collectives(program, mesh.shape, [slice_of(device) for device in mesh.devices.flat]),
        sum(not run.certain for run in runs(program)),
        _cost(done),
    )


def _compile(config: Config, mesh: Mesh, state: TrainState, platform: str) -> jax.stages.Compiled:
    total = _SOME_STEPS if config.train.steps is config.train.tokens is None else config.total_steps
    step = jitted_step(config, mesh, state, total)
    lower = lambda *given: step.trace(*given).lower(lowering_platforms=(platform,))
    return in_mesh(mesh, lower)(state, abstract_batch(config, mesh)).compile()


def state_memory(state: TrainState) -> dict[str, int]:
    """Return the bytes of parameters and of optimizer state per device."""
    return {"parameters": _on_device(state.params), "optimizer": _on_device(state.opt_state)}


def _on_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def bytes_needed(message: str) -> int | None:
    """Return the size from a compiler's message that a program does not fit, or None."""
    for pattern in _TOO_LARGE:
        found = pattern.search(message)
        if found:
            return round(float(found[1]) * _UNITS[found[2]])
    return None


def _memory(known: dict[str, int], found: Any, needed: int | None, topology: Topology) -> dict:
    """Return bytes: parameters and optimizer without padding, the rest as XLA lays it out.

    arguments   state and batch; the new state reuses the old one's memory
    temporaries peak of gradients, activations and working memory
    outputs     those that do not reuse an argument's memory
    total       all of these and the code; if it did not fit, the compiler's figure
    capacity    what the device lets a program use
    """
    parts = dict.fromkeys(("arguments", "temporaries", "outputs", "code"))
    if found is not None:
        parts = {
            "arguments": found.argument_size_in_bytes,
            "temporaries": found.temp_size_in_bytes,
            "outputs": found.output_size_in_bytes - found.alias_size_in_bytes,
            "code": found.generated_code_size_in_bytes,
        }
        needed = sum(parts.values())
    capacity = topology.capacity.memory
    return known | parts | {"total": needed, "capacity": capacity and int(capacity)}


def _cost(done: jax.stages.Compiled) -> dict[str, float]:
    found = done.cost_analysis() or {}
    names = {"flops": "flops", "bytes accessed": "bytes"}
    return {words: found[name] for name, words in names.items() if name in found}

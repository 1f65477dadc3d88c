"""The training step, as `cem train` jits it, compiled for devices that need not be here."""

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
# What libtpu says of a program that is too large, now and before; all of it is counted.
_TOO_LARGE = (
    re.compile(rf"total memory required for [\w ]+\({_NUMBER}\) exceeds available HBM"),
    re.compile(rf"Used {_NUMBER} of [\d.]+[KMGT]? hbm"),
)
_SOME_STEPS = 1000  # the schedule's length is a constant in the program: any number will do


class Compiled(NamedTuple):
    """What was found of one compilation. Bytes are of one device."""

    mesh: Mesh
    seconds: float
    memory: dict[str, Any]  # see `_memory`
    fits: bool
    bytes: int | None  # read from and written to main memory; None where nothing was compiled
    collectives: list[Collective] | None
    unread_loops: int  # whose counts are not known: what is in them counts once
    xla: dict[str, float]  # XLA's own cost analysis, which counts loops once


def compile_step(config: Config, topology: Topology) -> Compiled:
    """Lower and compile. A program that is too large for its device is found not to fit.

    Raises UserError where the configuration does not fit the mesh, RunFailed with what the compiler
    objects to.
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
    """Bytes on one device of the parameters and of the optimizer's state."""
    return {"parameters": _on_device(state.params), "optimizer": _on_device(state.opt_state)}


def _on_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def bytes_needed(message: str) -> int | None:
    """The size in a compiler's complaint that a program does not fit; None of any other error."""
    for pattern in _TOO_LARGE:
        found = pattern.search(message)
        if found:
            return round(float(found[1]) * _UNITS[found[2]])
    return None


def _memory(known: dict[str, int], found: Any, needed: int | None, topology: Topology) -> dict:
    """Bytes: parameters and optimizer without padding; the rest as XLA lays it out.

    arguments   the state and the batch; the new state takes the old one's place
    temporaries gradients, activations and working memory, at their fullest
    outputs     what does not take an argument's place
    total       all of it, code included; where it did not fit, what the compiler says is needed
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

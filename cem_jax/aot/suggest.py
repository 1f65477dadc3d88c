"""`cem compile --suggest`: find the fastest mesh, remat policy and microbatch that fit.

Each is varied in turn, from the best so far: at most a dozen compilations, not every combination.
If nothing fits, the best is what needs the least memory.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import jax

from cem_jax.aot.roofline import estimate
from cem_jax.aot.step import Compiled, compile_step, state_memory
from cem_jax.aot.topology import Topology
from cem_jax.config import Config, ModelConfig, mesh_sizes
from cem_jax.errors import RunFailed, UserError
from cem_jax.sharding.axes import MESH_AXES, ways
from cem_jax.sharding.mesh import batch_ways, usual_meshes
from cem_jax.train.setup import abstract_state, lay_out

POLICIES = get_args(get_type_hints(ModelConfig)["remat"])


class Tried(NamedTuple):
    """A configuration and the result of compiling it."""

    config: Config
    compiled: Compiled
    step_seconds: float | None
    mfu: float | None

    def rank(self) -> tuple:
        """Return a sort key: smaller is better; times are rounded to about 1 %."""
        total = self.compiled.memory["total"]
        if not self.compiled.fits:
            return (1, total, 0)
        seconds = math.inf if self.step_seconds is None else float(f"{self.step_seconds:.2e}")
        return (0, seconds, total)

    def summary(self) -> dict[str, Any]:
        """Return the row for the table of suggestions."""
        return {
            "mesh": dict(self.compiled.mesh.shape),
            "remat": self.config.model.remat,
            "microbatch": self.config.train.microbatch or self.config.train.global_batch,
            "fits": self.compiled.fits,
            "total": self.compiled.memory["total"],
            "step_seconds": self.step_seconds,
            "mfu": self.mfu,
            "compile_seconds": self.compiled.seconds,
        }


def suggestions(
    config: Config,
    topology: Topology,
    compile_: Callable[[Config, Topology], Compiled] = compile_step,
) -> tuple[list[Tried], int]:
    """Return everything that was tried, in order, and the index of the best.

    Raises UserError if the configuration divides over no mesh of these devices.
    """
    rows: list[Tried] = []
    problems: list[str] = []

    def attempt(candidates: Iterator[Config] | Sequence[Config]) -> None:
        for candidate in candidates:
            try:
                compiled = compile_(candidate, topology)
            except (UserError, RunFailed) as error:
                problems.extend(str(error).splitlines())
                continue
            found = estimate(candidate, topology, compiled)
            rows.append(Tried(candidate, compiled, found["step_seconds"], found["mfu"]))

    best = lambda: min(rows, key=Tried.rank)
    attempt([config])
    attempt(meshes(config, topology, rows[0].compiled.mesh.shape if rows else None))
    if not rows:
        raise UserError(*problems)
    attempt(list(policies(best().config)))
    attempt(list(microbatches(best())))
    return rows, rows.index(best())


def meshes(config: Config, topology: Topology, given: dict[str, int] | None) -> Iterator[Config]:
    """Yield other meshes over which everything divides and whose state alone may fit."""
    for mesh in usual_meshes(len(topology.devices), mesh_sizes(config)):
        if mesh == given:
            continue
        rows = _rows_for(config, ways(mesh, "batch"))
        if rows == config.train.global_batch:
            rows = config.train.microbatch and rows  # None if so configured ("all at once")
        candidate = None if rows == 0 else _changed(config, mesh=mesh, train={"microbatch": rows})
        if candidate is not None and _may_fit(candidate, topology):
            yield candidate


def _rows_for(config: Config, devices: int) -> int | None:
    """Return the smallest microbatch, from the configured one up, that divides; 0: none."""
    train = config.train
    least = train.microbatch or train.global_batch
    fitting = (
        rows
        for rows in range(least, train.global_batch + 1)
        if train.global_batch % rows == 0 and rows % devices == 0
    )
    return next(fitting, 0)


def _may_fit(config: Config, topology: Topology) -> bool:
    try:
        with jax.enable_x64(config.train.compute_dtype == "float64"):
            state = abstract_state(config, lay_out(config, topology.devices))
    except UserError:
        return False
    capacity = topology.capacity.memory
    return capacity is None or sum(state_memory(state).values()) < capacity


def policies(config: Config) -> Iterator[Config]:
    """Yield configurations with the other remat policies."""
    others = (p for p in POLICIES if p != config.model.remat)
    return filter(None, (_changed(config, model={"remat": policy}) for policy in others))


def microbatches(best: Tried) -> Iterator[Config]:
    """Yield twice and half the microbatch; also a quarter if nothing fits yet."""
    train, devices = best.config.train, batch_ways(best.compiled.mesh)
    rows = train.microbatch or train.global_batch
    for other in (2 * rows, rows // 2, *(() if best.compiled.fits else (rows // 4,))):
        if other and other % devices == 0 and train.global_batch % other == 0:
            candidate = _changed(best.config, train={"microbatch": other})
            if candidate is not None:
                yield candidate


def _changed(config: Config, **sections: dict[str, Any]) -> Config | None:
    """Return `config` with other values of some fields; None if they are invalid."""
    changed = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in sections.items()
    }
    try:
        return dataclasses.replace(config, **changed)
    except UserError:
        return None


def overrides_of(given: Config, chosen: Config) -> dict[str, Any]:
    """Return the values of `chosen` that differ from `given`, among the fields tried."""
    values = {}
    for section, names in (
        ("mesh", MESH_AXES),
        ("model", ("remat",)),
        ("train", ("microbatch",)),
    ):
        for name in names:
            old, new = (getattr(getattr(c, section), name) for c in (given, chosen))
            if old != new:
                values[f"{section}.{name}"] = new
    return values

"""`cem compile`: the training step compiled for hardware that is not here. Does it fit, how fast?

step      the compilation, and what it says
roofline  FLOPs, and a bound on the time
suggest   a short list of meshes, remat policies and microbatches
report    the tables
"""

import sys
from typing import Any

from cem_jax.aot.collectives import totals
from cem_jax.aot.report import rendered, rendered_choice
from cem_jax.aot.roofline import estimate
from cem_jax.aot.step import Compiled, compile_step
from cem_jax.aot.suggest import overrides_of, suggestions
from cem_jax.aot.topology import Topology, open_topology
from cem_jax.config import Config, load_config


def run(args: Any) -> dict[str, Any]:
    """`cem compile`: print what was found and return it.

    Raises UserError: the configuration, or no such topology, or its compiler is missing.
    """
    config = load_config(args.config, args.overrides)
    topology = open_topology(args.topology)
    if not args.suggest:
        found = described(config, topology, compile_step_aloud(config, topology))
        print(rendered(found))
        return found
    rows, best = suggestions(config, topology, compile_step_aloud)
    chosen = rows[best]
    found = described(chosen.config, topology, chosen.compiled)
    found |= {
        "suggestions": [row.summary() for row in rows],
        "recommended": overrides_of(config, chosen.config) if chosen.compiled.fits else None,
    }
    print(rendered_choice(found, best))
    print()
    print(rendered(found))
    return found


def compile_step_aloud(config: Config, topology: Topology) -> Compiled:
    """`compile_step`, which may take minutes, announced on stderr."""
    sizes = config.to_dict()["mesh"].items()
    mesh = ", ".join(f"{axis} {size}" for axis, size in sizes if size != 1) or "of one device"
    rows = config.train.microbatch or config.train.global_batch
    shown = (
        f"mesh {mesh}; {config.train.global_batch} sequences of {config.data.context}, {rows} at a "
        f"time; remat {config.model.remat}"
    )
    print(f"compiling for {topology.name}: {shown} …", end="", file=sys.stderr, flush=True)
    try:
        compiled = compile_step(config, topology)
    except BaseException as error:
        print(f" {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)
        raise
    verdict = "fits" if compiled.fits else "does not fit"
    print(f" {compiled.seconds:.0f} s, {verdict}", file=sys.stderr, flush=True)
    return compiled


def described(config: Config, topology: Topology, compiled: Compiled) -> dict[str, Any]:
    """What `cem compile --json` prints. Bytes are of one device, FLOPs of all unless they say."""
    found = compiled.collectives
    return {
        "fits": compiled.fits,
        "topology": topology.name,
        "device": topology.kind,
        "devices": len(topology.devices),
        "mesh": dict(compiled.mesh.shape),
        "memory": compiled.memory,
        **estimate(config, topology, compiled),
        "bytes": compiled.bytes,
        "collectives": None if found is None else totals(found),
        "collectives_by_axes": None if found is None else by_axes(found),
        "loops_not_read": compiled.unread_loops,
        "xla_cost_analysis": compiled.xla,
        "compile_seconds": compiled.seconds,
    }


def by_axes(found: list) -> dict[str, dict[str, Any]]:
    """Totals of the collectives over each set of mesh axes."""
    names = dict.fromkeys(one.axes for one in found)
    return {name: totals(one for one in found if one.axes == name) for name in names}

"""Report a compiled training step: its figures, and tables of them."""

from typing import Any

from cem_jax.aot.collectives import totals
from cem_jax.aot.roofline import estimate
from cem_jax.aot.step import Compiled
from cem_jax.aot.topology import Topology
from cem_jax.config import Config
from cem_jax.text import aligned, format_mb, format_mib

_PARTS = {
    "parameters": "parameters",
    "optimizer": "optimizer",
    "arguments": "state and batch, as laid out",
    "temporaries": "gradients and temporaries",
    "outputs": "outputs beside the state",
    "code": "program",
    "total": "total",
    "capacity": "capacity",
}


def described(config: Config, topology: Topology, compiled: Compiled) -> dict[str, Any]:
    """Return what `cem compile --json` prints: bytes per device, FLOPs over all unless named."""
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
    """Return the totals of the collectives over each set of mesh axes."""
    names = dict.fromkeys(one.axes for one in found)
    return {name: totals(one for one in found if one.axes == name) for name in names}


def rendered(found: dict[str, Any]) -> str:
    """Format one compilation as text."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1)
    head = (
        f"{found['topology']}: {found['devices']} × {found['device']}, mesh {mesh or '1'}, "
        f"compiled in {found['compile_seconds']:.0f} s"
    )
    parts = [head, _memory(found), _work(found), _collectives(found), _time(found)]
    return "\n\n".join(part for part in parts if part)


def rendered_choice(found: dict[str, Any], best: int) -> str:
    """Format what --suggest tried, with the recommended row marked."""
    rows = [("", "mesh", "remat", "microbatch", "MiB per device", "fits", "step, s", "MFU")]
    for index, row in enumerate(found["suggestions"]):
        mesh = " × ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
        rows.append(
            (
                "→" if index == best else "",
                mesh or "1",
                row["remat"],
                str(row["microbatch"]),
                format_mib(row["total"]),
                "yes" if row["fits"] else "no",
                _seconds(row["step_seconds"]),
                _percent(row["mfu"]),
            )
        )
    flags = found["recommended"]
    if flags is None:
        words = "nothing that was tried fits: use more devices, or a smaller model or context"
    elif flags:
        words = "recommended: " + " ".join(f"--config.{name}={v}" for name, v in flags.items())
    else:
        words = "recommended: the configuration as given"
    return f"{aligned(rows, '<<<>>>>>')}\n{words}"


def _memory(found: dict[str, Any]) -> str:
    memory = found["memory"]
    rows = [("memory per device", "MiB")]
    rows += [(words, format_mib(memory[part])) for part, words in _PARTS.items()]
    if memory["capacity"]:
        share = memory["total"] / memory["capacity"]
        verdict = f"{'fits' if found['fits'] else 'DOES NOT FIT'}: {share:.0%} of the capacity"
    else:
        verdict = "the capacity of this device is not known; its compiler did not object"
    if memory["temporaries"] is None:
        verdict += "; the compiler gave up, so there is no program to analyse"
    return f"{aligned(rows, '<>')}\n{verdict}"


def _work(found: dict[str, Any]) -> str:
    flops, xla = found["flops"], found["xla_cost_analysis"]
    rows = [
        ("work per step", ""),
        ("FLOPs per token, training", f"{flops['per_token']:,.0f}"),
        ("FLOPs of the model", f"{flops['model']:.4g}"),
        ("FLOPs with recomputation", f"{flops['executed']:.4g}"),
        ("of these, per device", f"{flops['per_device']:.4g}"),
    ]
    if found["bytes"] is not None:
        rows.append(("bytes moved in memory, per device", f"{found['bytes']:.4g}"))
    text = aligned(rows, "<>")
    if "flops" in xla:
        text += (
            f"\nXLA's own count is {xla['flops']:.4g} FLOPs and {xla.get('bytes', 0):.4g} bytes "
            "per device: it counts loops once and kernels as 0 FLOPs, so ours are shown"
        )
    return text


def _collectives(found: dict[str, Any]) -> str:
    if found["collectives"] is None:
        return ""
    if not found["collectives"]:
        return "no collectives"
    rows = [("collectives per step", "over", "count", "MB", "MB sent", "overlapped")]
    for axes, kinds in found["collectives_by_axes"].items():
        for kind, row in kinds.items():
            share = row["overlapped"] / row["sent"] if row["sent"] else 0.0
            rows.append(
                (
                    kind,
                    axes,
                    f"{row['count']:,}",
                    format_mb(row["bytes"]),
                    format_mb(row["sent"]),
                    f"{share:.0%}",
                )
            )
    rows[1:] = sorted(rows[1:])
    note = "per device, with each loop counted as often as it runs"
    if found["loops_not_read"]:
        note += f", except {found['loops_not_read']} loops whose trip counts are unknown"
    return f"{aligned(rows, '<<>>>>')}\n{note}"


def _time(found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    if found["step_seconds"] is None:
        if seconds["compute"] is None:
            return "no estimate of the time: this device's peaks are not known"
        return f"products alone take {_seconds(seconds['compute'])} s at the device's peak"
    rows = [
        ("estimate per step", "seconds"),
        ("products", _seconds(seconds["compute"])),
        ("memory", _seconds(seconds["memory"])),
        ("collectives, overlapped", _seconds(seconds["overlapped"])),
        ("collectives, added", _seconds(seconds["communication"])),
        ("step", _seconds(found["step_seconds"])),
        ("MFU", _percent(found["mfu"])),
    ]
    notes = "\n".join(f"assumed: {note}" for note in found["assumptions"])
    return f"{aligned(rows, '<>')}\n{notes}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"

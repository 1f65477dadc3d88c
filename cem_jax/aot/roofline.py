"""A lower bound on step time: products, bytes and messages at a device's peak rates.

Products are counted from the configuration (`train/flops.py`), since XLA counts a loop's body once
and a kernel as nothing. Bytes and messages are from the compiled program.
"""

from collections.abc import Sequence
from typing import Any

from cem_jax.aot.collectives import Collective
from cem_jax.aot.step import Compiled
from cem_jax.aot.topology import Capacity, Topology
from cem_jax.config import Config, ModelConfig
from cem_jax.train.flops import (
    folding_flops,
    forward_flops,
    peak_flops,
    training_flops_per_token,
)


def flops(config: Config, devices: int) -> dict[str, float]:
    """Return the FLOPs of a step, over all devices except `per_device`.

    model     forward and backward pass, as MFU counts them
    executed  also recomputation in the backward pass, and the folding of preconditioners
    """
    tokens = config.tokens_per_step
    per_token = training_flops_per_token(config.model, config.data.context)
    executed = tokens * (per_token + recomputed_flops(config.model, config.data.context))
    executed += 3 * folding_flops(config.model) * config.train.accumulation
    return {
        "per_token": per_token,
        "model": per_token * tokens,
        "executed": executed,
        "per_device": executed / devices,
    }


def recomputed_flops(model: ModelConfig, context: int) -> float:
    """Return the FLOPs per token of the forward pass that the backward pass repeats."""
    forward = forward_flops(model, context)
    again = 0.0
    if model.attention.implementation != "dense":
        # the scores, but not the values weighted by them: 1 of 2 products, 2 of 3 with a diagonal
        has_diagonal = model.attention.kind == "cem" and model.attention.diagonal != "none"
        again += forward.scores * (2 / 3 if has_diagonal else 1 / 2)
    if model.remat in ("attention", "full"):
        again += forward.attention + forward.mlp
    if model.remat == "full":
        again += forward.scores
    if model.attention.remat_steps:
        again += forward.attention
    if model.mlp.remat_steps:
        again += forward.mlp
    return again


def estimate(config: Config, topology: Topology, compiled: Compiled) -> dict[str, Any]:
    """Estimate the seconds of a step and of its parts, and MFU; list the assumptions.

    Seconds and MFU are None if the device's figures are unknown or nothing was compiled.
    """
    capacity, count = topology.capacity, len(topology.devices)
    peak = peak_flops(topology.kind) or capacity.flops
    counted = flops(config, count)
    parts = dict.fromkeys(("compute", "memory", "communication", "overlapped"))
    step = share = None
    if peak:
        parts["compute"] = counted["per_device"] / peak
    places = [topology.neighbourhood(device) for device in compiled.mesh.devices.flat]
    links = capacity.link and (len(set(places)) == 1 or capacity.far_link)
    if compiled.collectives is not None and peak and capacity.bandwidth and links:
        parts["memory"] = compiled.bytes / capacity.bandwidth
        for name, beside in (("communication", False), ("overlapped", True)):
            parts[name] = sum(
                one.times * one.sent / link_of(one, places, capacity)
                for one in compiled.collectives
                if one.overlapped == beside
            )
        step = max(parts["compute"], parts["memory"], parts["overlapped"])
        step += parts["communication"]
        share = counted["model"] / (step * count * peak)
    return {
        "flops": counted,
        "step_seconds": step,
        "mfu": share,
        "seconds": parts,
        "peak": {"flops": peak, "bandwidth": capacity.bandwidth, "link": capacity.link},
        "assumptions": _assumptions(config, capacity, compiled),
    }


def link_of(one: Collective, places: Sequence[int], capacity: Capacity) -> float:
    """Return a device's send rate, bytes per second; `places`: each one's `neighbourhood`."""
    far = any(len({places[device] for device in group}) > 1 for group in one.groups)
    return capacity.far_link if far else capacity.link


def _assumptions(config: Config, capacity: Capacity, compiled: Compiled) -> list[str]:
    found = [
        "a lower bound: products at the device's bfloat16 peak, main memory at its bandwidth, each "
        "array moved once per instruction, computing and moving at the same time",
        "collectives are rings at the links' full bandwidth, one at a time; those that the program "
        "does not run beside other work are added",
        "FLOPs are counted from the configuration; recomputation in the backward pass counts in "
        "the time but not in MFU",
    ]
    if config.train.compute_dtype != "bfloat16":
        found.append(f"{config.train.compute_dtype} computes slower than the bfloat16 peak")
    if compiled.unread_loops:
        found.append(
            f"{compiled.unread_loops} loops have unknown trip counts: what they move and send "
            "counts once"
        )
    if capacity.note:
        found.append(capacity.note)
    return found

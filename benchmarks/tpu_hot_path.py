"""The rest of a layer as XLA compiles it for a TPU: bytes and FLOPs of the program.

    benchmarks/tpu_hot_path.py

At cem_162m, 8 sequences of 2048, bfloat16, on one absent v5e chip. `least`: every array
that must outlive the pass, once. Times are rooflines of a v5e (197 TFLOP/s, 819 GB/s). XLA counts a
loop's body once: that of the cross-entropy is multiplied by its chunks here.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from tpu_static import ENVIRONMENT

os.environ |= ENVIRONMENT

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from cem_jax.energy import StepNorm, StepRule, at_state, descend, rms_norm
from cem_jax.energy.elementwise import hidden_force
from cem_jax.sharding.linear import project, readout
from cem_jax.sharding.mesh import in_mesh, make_mesh
from cem_jax.train.loss import _chunked_losses, chunk_length, chunk_size

BATCH, POSITIONS, DIM, WIDTH, VOCABULARY = 8, 2048, 864, 2304, 32_000
TOKENS = BATCH * POSITIONS
FLOPS, BANDWIDTH = 197e12, 819e9


class Part(NamedTuple):
    function: Callable
    shapes: tuple
    matmuls: int  # FLOPs
    least: int  # bytes
    loops: int = 1


def mlp(steps: int) -> Part:
    """Return T steps on ξ from x, and the gradients of x and all weights."""

    def forward(x, norm, multiplier, tied):
        h = rms_norm(x, norm, 1e-6)
        gamma = project(h, multiplier)
        force = lambda u: readout(
            hidden_force(project(u, tied), gamma, activation="silu", update="autodiff"), tied
        )
        force = at_state(force, StepNorm(norm, 1e-6))
        return descend(force, x, StepRule(1.0), steps=steps).astype(jnp.float32).sum()

    shapes = ((BATCH, POSITIONS, DIM), (DIM,), (WIDTH, DIM), (WIDTH, DIM))
    # state, z and γσ(z) written and read per step, and back; γ and its gradient
    least = 2 * TOKENS * (steps * (4 * DIM + 4 * WIDTH) + 4 * WIDTH)
    matmuls = 6 * TOKENS * DIM * WIDTH * (1 + 2 * steps)
    return Part(jax.grad(forward, argnums=(0, 1, 2, 3)), shapes, matmuls, least)


def norm() -> Part:
    forward = lambda x, weight: jnp.square(rms_norm(x, weight, 1e-6).astype(jnp.float32)).sum()
    shapes = ((BATCH, POSITIONS, DIM), (DIM,))
    return Part(jax.grad(forward, argnums=(0, 1)), shapes, 0, 2 * TOKENS * 3 * DIM)


def cross_entropy() -> Part:
    chunk = chunk_length(BATCH, POSITIONS, VOCABULARY, chunk_size())

    def forward(x, head):
        targets = jnp.zeros((BATCH, POSITIONS), jnp.int32)
        weights = jnp.ones((BATCH, POSITIONS))
        return _chunked_losses((0.0, chunk, 1), x, head, targets, weights)[0]

    shapes = ((BATCH, POSITIONS, DIM), (VOCABULARY, DIM))
    chunks = -(-POSITIONS // chunk)
    # float32 once, then bfloat16 written once and read twice
    logits = 2 * TOKENS * VOCABULARY * (2 + 1 + 2)
    least = 2 * TOKENS * 3 * DIM + chunks * 4 * VOCABULARY * DIM * 3 + logits
    matmuls = 6 * TOKENS * DIM * VOCABULARY
    return Part(jax.grad(forward, argnums=(0, 1)), shapes, matmuls, least, loops=chunks)


def main() -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    mesh = make_mesh({}, [device])
    single = jax.sharding.SingleDeviceSharding(device)
    print(f"jax {jax.__version__}\n")
    cells = ("forward and backward of", "GFLOP", "matmuls", "GB moved", "least", "roofline, ms")
    print("| " + " | ".join(cells) + " |\n" + "|---" * len(cells) + "|")
    parts = {f"MLP, T={steps}": mlp(steps) for steps in (1, 2, 4)}
    parts |= {"RMSNorm": norm(), "cross-entropy": in_mesh(mesh, cross_entropy)()}
    for name, part in parts.items():
        first, *rest = (
            jax.ShapeDtypeStruct(s, jnp.bfloat16 if i == 0 else jnp.float32, sharding=single)
            for i, s in enumerate(part.shapes)
        )
        trace = jax.jit(part.function).trace
        lower = lambda *a, t=trace: t(*a).lower(lowering_platforms=("tpu",))
        cost = in_mesh(mesh, lower)(first, *rest).compile().cost_analysis()
        flops, moved = (cost[key] * part.loops for key in ("flops", "bytes accessed"))
        shown = (flops / 1e9, part.matmuls / 1e9, moved / 1e9, part.least / 1e9)
        times = f"{1e3 * part.matmuls / FLOPS:.2f} matmuls, {1e3 * moved / BANDWIDTH:.2f} memory"
        print("| " + " | ".join((name, *(f"{x:,.2f}" for x in shown), times)) + " |", flush=True)


if __name__ == "__main__":
    main()

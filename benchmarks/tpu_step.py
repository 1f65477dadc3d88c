"""The whole training step compiled for an absent TPU: memory, never times.

    benchmarks/tpu_step.py sizes       four sizes × {Llama, CEM T=1, T=2} × {fused, blockwise}
    benchmarks/tpu_step.py recursion   CEM 162m at T = 1, 2, 4, 8
    benchmarks/tpu_step.py remat       CEM 162m, T=2: what to recompute
    benchmarks/tpu_step.py mesh        CEM 162m over four chips, data × tensor

One chip has 8 sequences of 2048 in one microbatch. libtpu is an installed package or
the file at TPU_LIBRARY_PATH.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tpu_static import ENVIRONMENT

os.environ |= ENVIRONMENT

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from cem_jax.config import load_config
from cem_jax.sharding.mesh import batch_sharding, in_mesh, make_mesh
from cem_jax.train.setup import abstract_state
from cem_jax.train.step import make_train_step

CONFIGS = Path(__file__).parents[1] / "configs"
TOPOLOGY = os.environ.get("TOPOLOGY", "v5e:2x2")
HBM = 16 * 2**30  # of a v5e chip
SEQUENCES = 8


def compiled(name: str, changes: dict, *, chips: int = 1, mesh: dict | None = None):
    """Return a shipped configuration's compiled step and the seconds it took to compile."""
    fields = {"train.global_batch": SEQUENCES * chips, "train.microbatch": None}
    config = load_config(str(CONFIGS / f"{name}.py"), fields | changes)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = make_mesh(mesh or {}, devices[:chips])
    state = abstract_state(config, mesh)
    shape = (config.train.global_batch, config.data.context + 1)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))}
    out = (jax.tree.map(lambda leaf: leaf.sharding, state), None)
    step = jax.jit(make_train_step(config, 1000, chips), donate_argnums=0, out_shardings=out)
    began = time.perf_counter()
    done = in_mesh(mesh, lambda *a: step.trace(*a).lower(lowering_platforms=("tpu",)))(state, batch)
    return done.compile(), time.perf_counter() - began


def row(label: str, name: str, changes: dict, **how) -> None:
    try:
        step, seconds = compiled(name, changes, **how)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0][:150]
        print(f"| {label} | does not compile: {reason} |", flush=True)
        return
    m = step.memory_analysis()
    mib = lambda count: f"{count / 2**20:,.0f}"
    total = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes
    total -= m.alias_size_in_bytes
    calls = step.as_text().count('custom_call_target="tpu_custom_call"')
    cells = (
        label, mib(m.argument_size_in_bytes), mib(m.temp_size_in_bytes), mib(total),
        "yes" if total <= HBM else "no", str(calls), f"{seconds:.0f}",
    )  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)


def head(title: str) -> None:
    print(f"\n**{title}** ({TOPOLOGY}, jax {jax.__version__})\n")
    cells = ("step", "state, MiB", "temporaries", "total", "fits 16 GiB", "kernels", "compile, s")
    print("| " + " | ".join(cells) + " |\n" + "|---" * len(cells) + "|", flush=True)


def steps(count: int) -> dict:
    return {"model.attention.steps": count, "model.mlp.steps": count}


def sizes() -> None:
    head(f"training step, {SEQUENCES} sequences of 2048, bf16, remat as shipped")
    for size in ("86m", "108m", "134m", "162m"):
        for kernel in ("auto", "blockwise"):
            how = {"model.attention.implementation": kernel}
            shown = "fused" if kernel == "auto" else kernel
            row(f"Llama {size}, {shown}", f"llama_{size}", how)
            for count in (1, 2):
                row(f"CEM {size} T={count}, {shown}", f"cem_{size}", how | steps(count))


def recursion() -> None:
    head("CEM 162m, remat full")
    for count in (1, 2, 4, 8):
        row(f"T={count}", "cem_162m", steps(count) | {"model.remat": "full"})
    for count in (1, 2, 4, 8):
        fields = {"model.remat": "full"}
        fields |= {"model.attention.remat_steps": True, "model.mlp.remat_steps": True}
        row(f"T={count}, remat_steps", "cem_162m", steps(count) | fields)


def remat() -> None:
    head("CEM 162m, T=2")
    steps_too = {"model.attention.remat_steps": True, "model.mlp.remat_steps": True}
    for policy in ("dots", "attention", "full"):
        row(policy, "cem_162m", {"model.remat": policy})
    row("none, remat_steps", "cem_162m", {"model.remat": "none"} | steps_too)


def mesh() -> None:
    head("CEM 162m over four chips")
    for sizes in ({"data": 4}, {"fsdp": 4}, {"data": 2, "tensor": 2}):
        label = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        row(label, "cem_162m", {"model.remat": "full"}, chips=4, mesh=sizes)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"sizes": sizes, "recursion": recursion, "remat": remat, "mesh": mesh}[name]()

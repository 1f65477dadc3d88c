"""The TPU attention kernels compiled for TPUs that are not here: memory, bytes, static cycles.

    benchmarks/tpu_static.py [--topology v5e:2x2,v6e:2x2,v5p:2x2x1] [--size 108m] [--blocks 512,256]
                             [--exact]
                             [--passes forward,backward,both,unfused]

At the sizes of the paper's Table 1: 8 sequences of 2048, bfloat16, a shared diagonal, slopes and
self biases. libtpu is an installed package, or where TPU_LIBRARY_PATH says. Each compilation is a
process of its own: the compiler's dump cannot be turned on later.

* bytes: of the compiled kernel's DMAs between HBM and VMEM, each as often as it runs. XLA's are
  its own cost analysis.
* cycles: bundles of the compiled kernel, for each loop as often as it runs, for one batch element.
  The scheduler's latencies are in them, stalls of the hardware are not: they compare programs, they
  predict no time.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
SIZES = {"86m": (672, 8), "108m": (672, 12), "134m": (768, 12), "162m": (864, 12)}
BATCH, POSITIONS = 8, 2048
FORMS = {"temporaries": ".1f", "gigabytes": ".3f", "kilocycles": ".1f", "seconds": ".0f"}
HANDFUL = 30  # bundles
GRANULE = 32  # bytes: the unit of a DMA's size in the dump
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*((?:>\s*)*)\{(.*)")
DMA = re.compile(r"dma\.(?:hbm_to_vmem|vmem_to_hbm)\b[^;]*?/\*size_in_granules=\*/(\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:2x2,v6e:2x2,v5p:2x2x1")
    parser.add_argument("--size", default=",".join(SIZES))
    parser.add_argument(
        "--blocks", help="query and key positions; those of the kernels if left out"
    )
    parser.add_argument("--exact", action="store_true", help="with the context Σ_k Σ_j p h_j")
    parser.add_argument("--passes", default="forward,backward,both")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        topology, size, what = options.child.split(",")
        print(json.dumps(measure(topology, size, what, options)))
        return
    print("| device | size | pass | temporaries, MiB | moved, GB | kilocycles | compile, s |")
    print("|---|---|---|---|---|---|---|")
    for topology in options.topology.split(","):
        for size in options.size.split(","):
            for what in options.passes.split(","):
                print(row(topology, size, what), flush=True)


def row(topology: str, size: str, what: str) -> str:
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        command = [sys.executable, *sys.argv, "--child", f"{topology},{size},{what}"]
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags, "CEM_DUMP": dump}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = next((x for x in done.stderr.splitlines() if "Error:" in x), done.stderr[-200:])
        return f"| {topology} | {size} | {what} | does not compile: {reason[:200]} |"
    found = json.loads(done.stdout.splitlines()[-1])
    cells = [found["device"], size, what]
    cells += [f"{found[n]:{form}}" for n, form in FORMS.items()]
    return "| " + " | ".join(cells) + " |"


def measure(topology: str, size: str, what: str, options) -> dict:
    """One compilation, in a process whose environment asks for the dump."""
    import jax
    from jax.experimental import topologies

    from cem_jax.kernels.inputs import Plan

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    kind = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
    )
    blocks = options.blocks and tuple(map(int, options.blocks.split(",")))
    dim, heads = SIZES[size]
    plan = Plan((dim / heads) ** 0.5, "summed" if options.exact else "none", blocks)
    function, arguments = program(what, dim, heads, plan, jax.sharding.SingleDeviceSharding(device))
    began = time.perf_counter()
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
        done = lowered.compile()
        moved, cycles = 0, 0.0
        for module, sizes in kernels(what, heads, arguments[0], plan):
            text = dumped(module.__name__.rsplit(".", 1)[-1])
            moved += bytes_moved(text, module, sizes)
            cycles += cycles_of(text, module, sizes)
    if what == "unfused":
        moved = done.cost_analysis()["bytes accessed"]
    return dict(
        device=device.device_kind,
        temporaries=done.memory_analysis().temp_size_in_bytes / 2**20,
        gigabytes=moved / 1e9,
        kilocycles=cycles / 1e3,
        seconds=time.perf_counter() - began,
    )


def program(what: str, dim: int, heads: int, plan, sharding):
    """A function of arrays with positions last, and the shapes it is compiled for.

    So XLA lays out what lies between a layer's products, whichever way its arguments come.
    """
    import jax
    import jax.numpy as jnp

    from cem_jax.kernels import dense, tpu

    shape = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, dtype, sharding=sharding)
    wide = shape(BATCH, dim, POSITIONS)
    f32 = shape(BATCH, dim, POSITIONS, dtype="float32")
    scalars = shape(heads, dtype="float32")
    flat = dict(q=wide, k=wide, g=wide, h=wide, slopes=scalars, self_bias=scalars)
    lse = shape(BATCH, heads, POSITIONS, dtype="float32")
    bar = (lse, f32, f32 if plan.context == "summed" else None)
    last = lambda x: jnp.swapaxes(x.reshape(BATCH, POSITIONS, -1), 1, 2)
    cotangents = lambda bar: (
        bar[0],
        by_head(bar[1], heads),
        None if bar[2] is None else first(bar[2]),
    )

    def forward(flat):
        lse, o, a = tpu.forward(inputs_of(flat, heads), plan)
        return lse, last(o), None if a is None else last(a)

    def backward(flat, lse, o, bar):
        inputs, o_BJKR = inputs_of(flat, heads), by_head(o, heads)
        return flattened(tpu.backward(inputs, plan, lse, o_BJKR, None, cotangents(bar)))

    def unfused(flat, bar):
        attend = lambda t: dense.attend(t, plan.tau, plan.context)
        pull_back = jax.vjp(attend, inputs_of(flat, heads))[1]
        return flattened(pull_back(cotangents(bar))[0])

    def flattened(gradients):
        leaves = jax.tree.leaves(gradients)
        return [x if x.ndim == 1 else last(x) for x in leaves]

    def both(flat, bar):
        lse, o, _ = forward(flat)
        return backward(flat, lse, o, bar)

    arguments = dict(forward=(flat,), backward=(flat, lse, f32, bar))
    functions = dict(forward=forward, backward=backward, both=both, unfused=unfused)
    return functions[what], arguments.get(what, (flat, bar))


def first(x):
    import jax.numpy as jnp

    return jnp.swapaxes(x, 1, 2)


def by_head(x, heads: int):
    return first(x).reshape(BATCH, POSITIONS, heads, -1)


def inputs_of(flat: dict, heads: int):
    from cem_jax.kernels.inputs import Inputs

    split = {n: by_head(flat[n], heads) for n in ("q", "k")}
    shared = {n: first(flat[n]) for n in ("g", "h")}
    return Inputs(**{**dict.fromkeys(Inputs._fields), **flat, **split, **shared})


def kernels(what: str, heads: int, flat: dict, plan):
    """(module, sizes) of each kernel in the program."""
    import jax

    from cem_jax.kernels import tpu_backward, tpu_forward
    from cem_jax.kernels.tpu_call import fitted

    inputs = jax.eval_shape(lambda flat: inputs_of(flat, heads), flat)
    if what in ("forward", "both"):
        yield tpu_forward, fitted(tpu_forward, inputs, plan)
    if what in ("backward", "both"):
        yield tpu_backward, fitted(tpu_backward, inputs, plan)


# What the dump says.


def dumped(name: str) -> list[str]:
    """Lines of a kernel's final bundles."""
    files = Path(os.environ["CEM_DUMP"]).glob(f"*{name}*-final_bundles.txt")
    found = [x for x in files if "schedule-analysis" not in x.name]
    return max(found, key=lambda x: x.stat().st_size).read_text(errors="ignore").splitlines()


def bytes_moved(text: list[str], module, sizes) -> int:
    """Between HBM and VMEM over the grid: a kept block moves once a batch element, others each."""
    from cem_jax.kernels.tpu_call import KEPT, shape_of
    from cem_jax.kernels.tpu_plan import padded_bytes

    kept = {padded_bytes(*shape_of(n, sizes)) for n in module.arrays(sizes)[1] if n in KEPT}
    total = 0
    for line in text:
        for granules in DMA.findall(line):
            size = int(granules) * GRANULE
            total += size * (1 if size in kept else sizes.positions // sizes.queries)
    return total * BATCH


def cycles_of(text: list[str], module, sizes) -> float:
    """Bundles of each loop times how often it runs, for one batch element.

    Depth 1 is the grid. Each sweep over the keys is a loop of depth 2 over whole tiles, a loop of
    depth 3 over heads inside, then for each tile on the diagonal one of depth 2 over heads. What is
    done once a batch element counts as if each block of queries did it.
    """
    together = max(n for n in range(1, module.HEADS_TOGETHER + 1) if sizes.heads % n == 0)
    steps = sizes.heads // together
    programs, ratio = sizes.positions // sizes.queries, sizes.queries // sizes.keys
    whole = ratio * programs * (programs - 1) // 2
    total, on_diagonal = 0, 0
    for depth, loop in loops(text):
        if depth == 1:
            total += programs * len(loop)
        elif max(loop) >= 3:
            total += whole * sum(steps if d >= 3 else 1 for d in loop)
            on_diagonal = ratio
        elif on_diagonal:
            total += programs * steps * len(loop)
            on_diagonal -= 1
        else:
            total += programs * len(loop)
    return total


def loops(text: list[str]) -> list:
    """Runs of bundles (1 or 2, their depths): of depth 1, and of deeper ones.

    A handful of either is the turning of a loop or a branch inside it, and joins its neighbour.
    """
    depths = [m.group(1).count(">") for m in map(BUNDLE.match, text) if m]
    found: list = []
    for kind, run in itertools.groupby((d for d in depths if d), key=lambda d: min(d, 2)):
        run = list(run)
        if found and (len(run) < HANDFUL or found[-1][0] == kind):
            found[-1][1].extend(run)
        else:
            found.append((kind, run))
    return found


if __name__ == "__main__":
    main()

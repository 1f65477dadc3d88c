"""The GPU kernels and training steps compiled for an H200 that is not here: memory, never times.

    benchmarks/gpu_static.py DIR kernels [SIZE…]   registers, spills and memory of the kernels
    benchmarks/gpu_static.py DIR steps [SIZE…]     memory of whole training steps

SIZE: 86m, 108m, 134m, 162m of Table 1, each with 8 sequences of 2048 in bfloat16. DIR holds CUDA's
compilers, neither a GPU nor a driver is needed; made with

    pip install --no-deps --target DIR jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION \\
        nvidia-cuda-nvcc nvidia-nvvm nvidia-nvjitlink nvidia-cuda-runtime nvidia-cuda-cupti

in the VERSION of the JAX in use. Exits with 1 where a kernel spills more than 128 bytes.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZES = {"86m": (672, 8), "108m": (672, 12), "134m": (768, 12), "162m": (864, 12)}
BATCH, POSITIONS = 8, 2048
MOST_SPILLED = 128  # bytes
# The device properties that XLA needs, as in its own description of an H200
TARGET = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_address_bits: 64
  name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0" }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def compiler_environment(packages: Path, dump: str) -> dict[str, str]:
    """Return the environment of a process that compiles for a GPU with a folder's packages."""
    cuda = packages / "nvidia" / "cu13"
    flags = (
        "--xla_gpu_autotune_level=0",  # which would need the device
        f"--xla_gpu_cuda_data_dir={cuda}",
        f"--xla_dump_to={dump}",
        "--xla_dump_hlo_as_text",
        "--xla_dump_emitter_re=ptx",
    )
    paths = (str(packages), os.environ.get("PYTHONPATH", ""))
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PTXAS": str(cuda / "bin" / "ptxas"),
        "CEM_DUMP": dump,
    }


def topology():
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda", target_config=TARGET, topology="1x1x1"
    ).devices


def kernels(sizes) -> bool:
    """Write a table of each size's kernels; return whether none spills too much."""
    import jax
    import jax.numpy as jnp

    from cem_jax.kernels import Call, Options, Outputs, Scores, dense
    from cem_jax.kernels.gpu.attention import IMPLEMENTATION as gpu

    [device] = topology()
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    mesh = jax.sharding.AbstractMesh(
        (), (), abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="gpu")
    )
    low, full = jnp.bfloat16, jnp.float32
    fits = True
    for size, average in ((s, c) for s in sizes for c in ("none", "summed")):
        dim, heads = SIZES[size]
        shared, bias = array((BATCH, POSITIONS, dim), low), array((heads,), full)
        wide = array((BATCH, POSITIONS, heads, dim // heads), low)
        call = Call(q=wide, k=wide, g=shared, h=shared, scores=Scores(bias, bias))
        do, dlse = array(wide.shape, full), array((BATCH, heads, POSITIONS), full)
        bar = Outputs(dlse, do, None if average == "none" else array(shared.shape, full))
        options = Options(float(dim // heads) ** 0.5, average)

        def fused(call, bar, options=options):
            outputs = gpu.forward(call, options)
            return outputs, gpu.backward(call, options, outputs, bar)

        def unfused(call, bar, options=options):
            outputs, pull_back = jax.vjp(lambda t: dense.attend(t, options), call)
            return outputs, pull_back(bar)

        memory = {}
        for name, function in (("unfused", unfused), ("fused", fused)):
            clear_dump()
            with jax.sharding.use_abstract_mesh(mesh):
                traced = jax.jit(function).trace(call, bar)
                compiled = traced.lower(lowering_platforms=("cuda",)).compile()
            memory[name] = compiled.memory_analysis().temp_size_in_bytes / 2**20
        print(
            f"\n**{size}, {'exact gradient' if average == 'summed' else 'Algorithm 1'}**: "
            f"temporaries of forward and backward {memory['fused']:,.0f} MiB, "
            f"unfused {memory['unfused']:,.0f} MiB (jax {jax.__version__})\n"
        )
        head("kernel", "threads", "registers", "spilled, bytes", "shared, KiB", "programs an SM")
        for cells in assembled():
            fits &= max(cells[3:5]) <= MOST_SPILLED
            name, threads, registers, stores, loads, shared_bytes = cells
            together = programs_together(threads, registers, shared_bytes)
            row(name, threads, registers, max(stores, loads), shared_bytes // 1024, together)
    return fits


def programs_together(threads: int, registers: int, shared: int) -> int:
    """Return the number of programs that one multiprocessor holds at once."""
    by_registers = 65536 // (threads * -(-registers // 8) * 8)
    return min(by_registers, 233472 // (shared + 1024), 2048 // threads)


def clear_dump() -> None:
    for path in Path(os.environ["CEM_DUMP"]).iterdir():
        path.unlink()


def assembled():
    """Return the last program's (kernel, threads, registers, spill stores, loads, shared bytes)."""
    dump = Path(os.environ["CEM_DUMP"])
    shared = {}
    for path in dump.glob("*thunk_sequence.txt"):
        found = re.findall(r"\] (\w+) grid.*shared_memory: (\d+)", path.read_text())
        shared |= {name: int(size) for name, size in found}
    for path in sorted(dump.glob("*.ptx")):
        ptx = path.read_text()
        [name] = re.findall(r"\.entry (\w+)", ptx)[:1]
        if not name.startswith("cem_"):
            continue
        command = [os.environ["PTXAS"], "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        numbers = (
            re.search(r"\.(?:req|max)ntid (\d+)", ptx),
            re.search(r"Used (\d+) registers", said),
            re.search(r"(\d+) bytes spill stores", said),
            re.search(r"(\d+) bytes spill loads", said),
        )
        yield (name, *(int(n.group(1)) for n in numbers), shared[name])


def steps(sizes) -> bool:
    """Write the memory of training steps at T = 1, T = 2 and of Llama, fused and blockwise."""
    import jax
    import jax.numpy as jnp

    from cem_jax.config import load_config
    from cem_jax.sharding.mesh import batch_sharding, in_mesh, make_mesh
    from cem_jax.train.setup import abstract_state
    from cem_jax.train.step import make_train_step

    mesh = make_mesh({}, topology())
    print(f"\n**training step**, {BATCH} sequences of {POSITIONS}, bf16 (jax {jax.__version__})\n")
    head("step", "attention", "state, MiB", "temporaries, MiB", "kernels")
    for size in sizes:
        for model, count in (("llama", 1), ("cem", 1), ("cem", 2)):
            for implementation in ("auto", "blockwise", "dense"):
                fields = {
                    "train.global_batch": BATCH,
                    "train.microbatch": None,
                    "model.attention.steps": count,
                    "model.mlp.steps": count,
                    "model.attention.implementation": implementation,
                }
                config = load_config(str(ROOT / "configs" / f"{model}_{size}.py"), fields)
                state = abstract_state(config, mesh)
                tokens = jax.ShapeDtypeStruct(
                    (BATCH, POSITIONS + 1), jnp.int32, sharding=batch_sharding(mesh)
                )
                clear_dump()
                step = jax.jit(make_train_step(config, 1000), donate_argnums=0)
                lower = lambda *a, step=step: step.trace(*a).lower(lowering_platforms=("cuda",))
                compiled = in_mesh(mesh, lower)(state, {"tokens": tokens}).compile()
                m = compiled.memory_analysis()
                row(
                    f"{model} {size}, T = {count}",
                    "fused" if implementation == "auto" else implementation,
                    f"{m.argument_size_in_bytes / 2**20:,.0f}",
                    f"{m.temp_size_in_bytes / 2**20:,.0f}",
                    compiled.as_text().count("__gpu$xla.gpu.triton"),
                )
    return True


def head(*cells: str) -> None:
    row(*cells)
    row(*["---"] * len(cells))


def row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> int:
    packages, what, *sizes = sys.argv[1:]
    if "CEM_DUMP" in os.environ:
        sys.path.insert(0, str(ROOT))
        fits = {"kernels": kernels, "steps": steps}[what](sizes or SIZES)
        return 0 if fits else 1
    with tempfile.TemporaryDirectory() as dump:
        environment = compiler_environment(Path(packages).resolve(), dump)
        return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[2] not in ("kernels", "steps"):
        sys.exit(__doc__)
    sys.exit(main())

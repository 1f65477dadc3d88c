"""The TPU attention kernels compiled for TPUs that are not here: memory, bytes, static cycles.

    benchmarks/tpu_static.py [--topology v5e:2x2,v6e:2x2,v5p:2x2x1] [--size 108m] [--blocks 512,256]
                             [--positions 2048] [--batch 8] [--exact] [--streamed]
                             [--passes forward,backward,both,blockwise,unfused]

At the sizes of the paper's Table 1 and two larger ones: bfloat16, a shared diagonal, slopes and
self biases, 16,384 positions in all. libtpu is an installed package or the file at
TPU_LIBRARY_PATH. Each compilation is a separate process: the compiler's dump cannot be turned on
later.

Columns: the kernel of each pass, r(esident) or s(treamed), and its blocks of query and key
positions; what the kernels move between HBM and VMEM, and what XLA does around them or in their
place, mostly layout changes; cycles of the kernels for one batch element. `tpu_bundles` says
how both are counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
SIZES = {"86m": (672, 8), "108m": (672, 12), "134m": (768, 12), "162m": (864, 12)}
SIZES |= {"1.3b": (2048, 16), "7b": (4096, 32)}
COLUMNS = {
    "kernels": ("kernels", ""),
    "temporaries": ("temporaries, MiB", ".0f"),
    "moved": ("kernels move, GB", ".3f"),
    "around": ("XLA moves, GB", ".3f"),
    "kilocycles": ("kilocycles", ".1f"),
    "seconds": ("compile, s", ".0f"),
}

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:2x2,v6e:2x2,v5p:2x2x1")
    parser.add_argument("--size", default=",".join(SIZES))
    parser.add_argument(
        "--blocks", help="query and key positions; those of the kernels if left out"
    )
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--batch", type=int, help="sequences; of 16,384 positions if left out")
    parser.add_argument("--streamed", action="store_true", help="kernels, where others fit too")
    parser.add_argument("--exact", action="store_true", help="with the context Σ_k Σ_j p h_j")
    parser.add_argument("--passes", default="forward,backward,both")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batch = options.batch or max(1, 16384 // options.positions)
    if options.child:
        topology, size, what = options.child.split(",")
        print(json.dumps(measure(topology, size, what, options)))
        return
    titles = ["device", "size", "pass", *(title for title, _ in COLUMNS.values())]
    print("| " + " | ".join(titles) + " |", "|---" * len(titles) + "|", sep="\n")
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
    cells += [f"{found[n]:{form}}" for n, (_, form) in COLUMNS.items()]
    return "| " + " | ".join(cells) + " |"


def measure(topology: str, size: str, what: str, options) -> dict:
    """Compile once, in a process whose environment requests the dump."""
    import jax
    from tpu_bundles import bytes_moved, cycles_of, dumped

    from cem_jax.aot.topology import open_topology
    from cem_jax.kernels import Options, Outputs
    from cem_jax.kernels.tpu import attention as tpu

    device = open_topology(topology).devices[0]
    kind = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
    )
    if options.streamed:
        tpu.FORWARD, tpu.BACKWARD = tpu.FORWARD[-1:], tpu.BACKWARD[-1:]
    blocks = options.blocks and tuple(map(int, options.blocks.split(",")))
    dim, heads = SIZES[size]
    average = "summed" if options.exact else "none"
    how = Options((dim / heads) ** 0.5, average, block_sizes=blocks or None)
    flat, bar, lse = shapes(dim, heads, options, jax.sharding.SingleDeviceSharding(device))
    function = Program(heads, how)
    outputs = Outputs(lse, bar[1], None)
    arguments = dict(forward=(flat,), backward=(flat, outputs, bar)).get(what, (flat, bar))
    began = time.perf_counter()
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(getattr(function, what)).trace(*arguments)
        done = traced.lower(lowering_platforms=("tpu",)).compile()
        moved, cycles, names = 0, 0.0, []
        for kernel, sizes in function.kernels(what, flat):
            text = dumped(kernel)
            moved += options.batch * bytes_moved(text, kernel, sizes, kind.device_kind)
            cycles += cycles_of(text, sizes, kernel.heads_together)
            names.append(f"{'s' if sizes.streamed else 'r'} {sizes.queries}×{sizes.keys}")
    return dict(
        device=device.device_kind,
        kernels=", ".join(names),
        temporaries=done.memory_analysis().temp_size_in_bytes / 2**20,
        moved=moved / 1e9,
        around=around_kernels(done.as_text()) / 1e9,
        kilocycles=cycles / 1e3,
        seconds=time.perf_counter() - began,
    )


def around_kernels(text: str) -> int:
    """Return the bytes that XLA's own instructions move, without kernels' operands."""
    from cem_jax.aot import hlo, traffic

    kernel = 'custom_call_target="tpu_custom_call"'
    free = lambda line: line.replace(" custom-call(", " after-all(") if kernel in line else line
    return traffic.bytes_moved(hlo.parse("\n".join(map(free, text.splitlines()))))


def shapes(dim: int, heads: int, options, sharding):
    """Return the shapes of the inputs, the cotangents and lse, positions last.

    XLA lays out arrays between a layer's products like this, whatever the arguments' layout.
    """
    import jax

    from cem_jax.kernels import Outputs

    batch, positions = options.batch, options.positions
    shape = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, dtype, sharding=sharding)
    wide = shape(batch, dim, positions)
    f32 = shape(batch, dim, positions, dtype="float32")
    scalars = shape(heads, dtype="float32")
    lse = shape(batch, heads, positions, dtype="float32")
    flat = dict(q=wide, k=wide, g=wide, h=wide, slopes=scalars, self_bias=scalars)
    return flat, Outputs(lse, f32, f32 if options.exact else None), lse


class Program:
    """The programs to compile, on arrays with positions last."""

    def __init__(self, heads: int, options):
        self.heads, self.options = heads, options

    def forward(self, flat):
        return self._forward(self._tpu(), flat)

    def backward(self, flat, outputs, bar):
        return self._backward(self._tpu(), flat, outputs, bar)

    def both(self, flat, bar):
        return self._both(self._tpu(), flat, bar)

    def blockwise(self, flat, bar):
        from cem_jax.kernels import blockwise

        return self._both(blockwise.IMPLEMENTATION, flat, bar)

    def unfused(self, flat, bar):
        import jax

        from cem_jax.kernels import dense

        attend = lambda call: dense.attend(call, self.options)
        pull_back = jax.vjp(attend, self._call(flat))[1]
        return self._flattened(pull_back(self._by_heads(bar))[0])

    def kernels(self, what: str, flat):
        """Return (kernel, sizes) of each kernel in the program."""
        import jax

        from cem_jax.kernels.tpu import attention as tpu

        call = jax.eval_shape(self._call, flat)
        for name, kernels in (("forward", tpu.FORWARD), ("backward", tpu.BACKWARD)):
            if what in (name, "both"):
                yield tpu.fitted(kernels, call, self.options)

    def _tpu(self):
        from cem_jax.kernels.tpu.attention import IMPLEMENTATION

        return IMPLEMENTATION

    def _both(self, implementation, flat, bar):
        outputs = self._forward(implementation, flat)
        return self._backward(implementation, flat, outputs, bar)

    def _forward(self, implementation, flat):
        lse, o, a = implementation.forward(self._call(flat), self.options)
        return lse, _last(o), None if a is None else _last(a)

    def _backward(self, implementation, flat, outputs, bar):
        outputs, bar = self._by_heads(outputs)._replace(a=None), self._by_heads(bar)
        gradients = implementation.backward(self._call(flat), self.options, outputs, bar)
        return self._flattened(gradients)

    def _call(self, flat: dict):
        from cem_jax.kernels import Call, Scores

        q, k = (self._by_head(flat[name]) for name in ("q", "k"))
        g, h = (_first(flat[name]) for name in ("g", "h"))
        return Call(q=q, k=k, g=g, h=h, scores=Scores(flat["slopes"], flat["self_bias"]))

    def _by_heads(self, outputs):
        from cem_jax.kernels import Outputs

        lse, o, a = outputs
        return Outputs(lse, self._by_head(o), None if a is None else _first(a))

    def _by_head(self, x):
        x = _first(x)
        return x.reshape(*x.shape[:2], self.heads, -1)

    def _flattened(self, gradients):
        import jax

        return [x if x.ndim == 1 else _last(x) for x in jax.tree.leaves(gradients)]


def _first(x):
    return x.swapaxes(1, 2)


def _last(x):
    return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)


if __name__ == "__main__":
    main()

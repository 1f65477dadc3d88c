"""The benchmarks of the core, a table for each: `make benchmarks`, or `benchmarks/run.py NAME…`.

update     jax.grad of the energies against the closed forms
llama      our Llama's training step against a minimal one in plain JAX
recursion  CEM at T = 1 and T = 2 against our Llama
loop       `cem train` against its bare step
memory     peak memory of blockwise attention over J
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import plain_llama
from timing import Stepper, interleaved

from cem_jax.config import Config, load_config
from cem_jax.kernels import Call, Options, total_log_partition
from cem_jax.train.flops import flops_per_token
from cem_jax.train.step import initial_state, make_train_step

ROUNDS = 7
BASE = str(Path(__file__).parents[1] / "configs" / "base.py")
SIZE = {
    "model.vocab_size": 4096,
    "model.dim": 256,
    "model.layers": 4,
    "model.attention.heads": 4,
    "model.mlp.dim": 688,
    "model.scan_layers": False,
    "data.context": 256,
    "train.global_batch": 16,
    "train.steps": 1000,
}
LLAMA = {
    "model.attention.kind": "llama",
    "model.attention.position": "rope",
    "model.attention.self_bias": False,
    "model.mlp.kind": "gated",
    "model.attention.steps": 1,
    "model.mlp.steps": 1,
}
PLAIN_CEM = {
    "model.attention.diagonal": "none",
    "model.attention.preconditioner": "none",
    "model.mlp.preconditioner": "none",
}


def config(*changes: dict, dtype: str = "float32") -> Config:
    fields = SIZE | {"train.compute_dtype": dtype}
    for change in changes:
        fields = fields | change
    return load_config(BASE, fields)


def steps(count: int) -> dict:
    return {"model.attention.steps": count, "model.mlp.steps": count}


def tokens(c: Config) -> dict:
    shape = (c.train.global_batch, c.data.context + 1)
    return {"tokens": np.random.default_rng(0).integers(0, c.model.vocab_size, shape, np.int32)}


def stepper(c: Config) -> Stepper:
    return Stepper(make_train_step(c, 1000), jax.jit(lambda: initial_state(c))(), tokens(c))


def update() -> None:
    rows = []
    for name, kernel in (("blockwise", "blockwise"), ("dense", "dense")):
        both = {}
        for rule in ("autodiff", "closed_form"):
            change = {
                "model.attention.update": rule,
                "model.mlp.update": rule,
                "model.attention.implementation": kernel,
            }
            both[rule] = stepper(config(change))
        seconds = interleaved(both, ROUNDS)
        flops = both["autodiff"].flops / both["closed_form"].flops
        time = seconds["autodiff"] / seconds["closed_form"]
        rows.append((name, f"{flops:.4f}", f"{time:.3f}", f"{seconds['autodiff'] * 1e3:.0f} ms"))
    table("update: autodiff / closed_form, CEM T=2", ("kernel", "FLOPs", "time", "step"), rows)


def llama() -> None:
    rows = []
    for dtype in ("float32", "bfloat16"):
        c = config(LLAMA, dtype=dtype)
        sizes = dict(dim=256, layers=4, mlp=688, vocab=4096)
        params = plain_llama.init(jax.random.key(0), **sizes)
        init, step = plain_llama.make_step(heads=4, dtype=jnp.dtype(dtype))
        plain = Stepper(step, (params, init(params)), tokens(c)["tokens"])
        seconds = interleaved({"ours": stepper(c), "plain": plain}, ROUNDS)
        rate = {name: c.tokens_per_step / s for name, s in seconds.items()}
        share = f"{rate['ours'] / rate['plain']:.3f}"
        rows.append((dtype, f"{rate['ours']:,.0f}", f"{rate['plain']:,.0f}", share))
    table("llama: tokens/s", ("dtype", "ours", "plain JAX", "ours / plain"), rows)


def recursion() -> None:
    rows = []
    full = {"CEM": {}, "CEM, no diagonal, no P": PLAIN_CEM}
    for dtype in ("float32", "bfloat16"):
        for name, change in full.items():
            configs = {
                "llama": config(LLAMA, dtype=dtype),
                "T=1": config(change, steps(1), dtype=dtype),
                "T=2": config(change, steps(2), dtype=dtype),
            }
            seconds = interleaved({key: stepper(c) for key, c in configs.items()}, ROUNDS)
            work = {k: flops_per_token(c.model, c.data.context) for k, c in configs.items()}
            rows.append(
                (
                    f"{name}, {dtype}",
                    f"{seconds['llama'] / seconds['T=1']:.3f}",
                    f"{seconds['T=2'] / seconds['T=1']:.3f}",
                    f"{work['T=2'] / work['T=1']:.3f}",
                    f"{seconds['T=2'] / seconds['llama']:.3f}",
                    f"{work['T=2'] / work['llama']:.3f}",
                )
            )
    head = ("model", "T=1 / Llama tok/s", "T2/T1 time", "T2/T1 FLOPs", "T2/Llama time")
    table("recursion", (*head, "T2/Llama FLOPs"), rows)


def loop() -> None:
    from cem_jax.runs.metrics import read_metrics
    from cem_jax.runs.training import train

    with tempfile.TemporaryDirectory() as folder:
        data = small_dataset(Path(folder))
        quickstart = str(Path(BASE).with_name("quickstart.py"))
        changes = {"data.path": data, "train.steps": 200, "checkpoint.every": 1000}
        c = load_config(quickstart, changes | {"eval.every": 1000, "eval.batches": 1})
        rates, bare = [], stepper(c)
        for attempt in range(3):
            workdir = Path(folder) / f"run{attempt}"
            train(c, workdir, stream=sys.stderr)
            lines = [x for x in read_metrics(workdir) if x["kind"] == "train"]
            rate = lines[-1]["tokens_per_second"]
            step = interleaved({"bare": bare}, 100)["bare"]
            rates.append(
                (
                    f"{rate:,.0f}",
                    f"{c.tokens_per_step / step:,.0f}",
                    rate * step / c.tokens_per_step,
                )
            )
    rows = [(a, b, f"{share:.3f}") for a, b, share in rates]
    table("loop: tokens/s", ("cem train", "bare step", "share"), rows)


def small_dataset(folder: Path) -> str:
    from cem_jax.commands import demo

    return str(demo.make_dataset(folder, 4096, sys.stderr))


def memory() -> None:
    rows = []
    for positions in (512, 1024, 2048, 4096):
        shape = (1, positions, 8, 64)
        key = jax.random.key(0)
        q, k = jax.random.normal(key, (2, *shape))
        found = [str(positions)]
        for kernel in ("blockwise", "dense"):

            def layer(q, k, kernel=kernel):
                options = Options(8.0, implementation=kernel)
                energy = lambda q: total_log_partition(Call(q, k), options).sum()
                return jnp.sum(jnp.square(jax.grad(energy)(q)))

            compiled = jax.jit(jax.grad(layer, argnums=(0, 1))).lower(q, k).compile()
            found.append(f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:,.1f}")
        rows.append(tuple(found))
    table("memory: MiB of temporaries, forward and backward", ("J", "blockwise", "dense"), rows)


def table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n**{title}** (jax {jax.__version__}, {jax.devices()[0].device_kind})\n")
    for row in (head, tuple("---" for _ in head), *rows):
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


BENCHMARKS = {f.__name__: f for f in (update, llama, recursion, loop, memory)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args().names or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"{', '.join(unknown)}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    for name in names:
        BENCHMARKS[name]()

"""The GPU kernels on a GPU: their gradients checked, then attention and training steps timed.

    benchmarks/gpu_attention.py [--minutes=7.5] [check] [attention] [steps]
    benchmarks/gpu_attention.py --tiny     all three on a CPU, to see that this script works

check      gradients on this device against unfused float32; exits with 1 where they differ
attention  one layer's attention, fused, unfused, and cuDNN's of the same shape, without a diagonal
steps      training steps of Llama and of CEM at T = 1 and T = 2: tokens a second and MFU

At the four sizes of Table 1, with 8 sequences of 2048 in bfloat16. What does not fit into the
minutes is named and left out.
"""

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from cem_jax.config import load_config
from cem_jax.kernels import Call, Options, Outputs, Scores, dense
from cem_jax.kernels.gpu.attention import IMPLEMENTATION as gpu
from cem_jax.train.flops import mfu, training_flops_per_token
from cem_jax.train.step import initial_state, make_train_step

CONFIGS = Path(__file__).parents[1] / "configs"
SIZES = {"162m": (864, 12), "86m": (672, 8), "108m": (672, 12), "134m": (768, 12)}
MODELS = (("llama", 1), ("cem", 1), ("cem", 2))
TINY = "--tiny" in sys.argv
BATCH, POSITIONS = (1, 16) if TINY else (8, 2048)
ROUNDS, REPEATS = (1, 1) if TINY else (5, 20)
if TINY:
    SIZES = {"tiny": (32, 2)}
    MODEL = {
        "model.vocab_size": 64,
        "model.dim": 32,
        "model.layers": 1,
        "model.attention.heads": 2,
        "model.mlp.dim": 32,
        "data.context": POSITIONS,
    }
began = time.perf_counter()


def minutes() -> float:
    given = [word for word in sys.argv if word.startswith("--minutes=")]
    return float(given[-1].split("=")[1]) if given else 7.5


def out_of_time() -> bool:
    return not TINY and time.perf_counter() - began > 60 * minutes()


def draw(batch: int, positions: int, dim: int, heads: int, dtype) -> tuple[Call, Outputs]:
    """Draw (a call with a shared diagonal and both biases, gradients of its outputs)."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)
    wide, flat = (batch, positions, heads, dim // heads), (batch, positions, dim)
    q, k, g, h = (normal(*shape).astype(dtype) for shape in (wide, wide, flat, flat))
    slopes = 2.0 ** -jnp.arange(1.0, heads + 1)
    call = Call(q=q, k=k, g=0.1 * g, h=h, scores=Scores(slopes, jnp.zeros(heads)))
    return call, Outputs(normal(batch, heads, positions), normal(*wide), normal(*flat))


def both_passes(how: str, options: Options):
    """Return the function (call, cotangents) → (outputs, gradients). `how`: fused | unfused."""

    def fused(call, bar):
        outputs = gpu.forward(call, options)
        return outputs, gpu.backward(call, options, outputs, bar)

    def unfused(call, bar):
        outputs, pull_back = jax.vjp(lambda t: dense.attend(t, options), call)
        return outputs, pull_back(bar)[0]

    return {"fused": fused, "unfused": unfused}[how]


def check() -> bool:
    """Check gradients: float32 to 1e-5, bfloat16 to 1.5 times XLA's own error."""
    table("check: relative errors", "case", "dtype", "worst", "error", "allowed", "right")
    right = True
    positions = 40 if TINY else 300
    for average, dim in (("none", 168), ("summed", 112)):
        options = Options(6.0, average, "pallas", interpret=TINY or None)
        low, bar = draw(2, positions, dim, 2, jnp.bfloat16)
        if average == "none":
            bar = bar._replace(a=None)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), low)
        run = lambda how, x, o=options, bar=bar: jax.jit(both_passes(how, o))(x, bar)
        with jax.default_matmul_precision("highest"):
            exact = run("unfused", wide)
        own = errors(run("unfused", low), exact)
        for dtype, inputs in (("float32", wide), ("bfloat16", low)):
            found = errors(run("fused", inputs), exact)
            allowed = {
                name: 1e-5 if dtype == "float32" else 1.5 * own[name] + 2.0**-12 for name in found
            }
            worst = max(found, key=lambda name: found[name] / allowed[name])
            fine = found[worst] <= allowed[worst]
            right &= fine
            row(average, dtype, worst, f"{found[worst]:.1e}", f"{allowed[worst]:.1e}", fine)
    return right


def errors(found, exact) -> dict[str, float]:
    """Return relative errors of outputs and of the gradients with respect to q, k, g and h."""
    of = lambda pair: (
        dict(zip(("lse", "o", "a"), pair[0], strict=True))
        | {f"d{name}": x for name, x in pair[1]._asdict().items() if name in "qkgh"}
    )
    found, exact = of(found), of(exact)
    norm = lambda x: float(jnp.linalg.norm(x.astype(jnp.float32).ravel()))
    difference = lambda n: norm(found[n].astype(jnp.float32) - exact[n])
    return {n: difference(n) / norm(x) for n, x in exact.items() if x is not None}


def attention() -> bool:
    """Time one layer's attention."""
    head = ("size", "attention", "forward, µs", "both passes, µs", "TFLOP/s, both")
    table("attention, bfloat16", *head)
    for size, (dim, heads) in SIZES.items():
        options = Options((dim // heads) ** 0.5, implementation="pallas", interpret=TINY or None)
        call, bar = draw(BATCH, POSITIONS, dim, heads, jnp.bfloat16)
        bar = bar._replace(a=None)
        pairs = BATCH * POSITIONS * (POSITIONS + 1) / 2
        forwards = {
            "fused": lambda t, options=options: gpu.forward(t, options),
            "unfused": lambda t, options=options: dense.attend(t, options),
        }
        for name, forward in forwards.items():
            both = both_passes(name, options)
            # FLOPs per pair, in units of D: 6 and 16 with a diagonal that the heads share
            report(size, name, (forward, call), (both, call, bar), 22 * dim * pairs)
        q, k, do = call.q, call.k, bar.o.astype(jnp.bfloat16)
        plain = (cudnn, q, k), (cudnn_both, q, k, do)
        report(size, "cuDNN, no diagonal", *plain, 14 * dim * pairs)
    return True


def cudnn(q, k):
    return jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")


def cudnn_both(q, k, do):
    o, pull_back = jax.vjp(cudnn, q, k)
    return o, pull_back(do)


def report(size: str, name: str, forward: tuple, both: tuple, flops: float) -> None:
    """Write a row from a function and its arguments per pass, or the reason it cannot run."""
    if out_of_time():
        row(size, name, "not run: out of time", "", "")
        return
    try:
        seconds = [seconds_each(jax.jit(f), *arguments) for f, *arguments in (forward, both)]
    except (ValueError, RuntimeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        row(size, name, f"refused: {str(error).strip().splitlines()[0][:120]}", "", "")
        return
    row(size, name, *(f"{s * 1e6:,.0f}" for s in seconds), f"{flops / seconds[1] / 1e12:,.1f}")


def seconds_each(function, *arguments) -> float:
    """Return the median over rounds; a round waits only for its last call."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(REPEATS):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / REPEATS)
    return median(times)


def steps() -> bool:
    """Time training steps through `cem_jax.train.step`."""
    table("training step, bfloat16", "model", "T", "step, ms", "tokens/s", "MFU", "compile, s")
    for size in SIZES:
        for model, count in MODELS:
            if out_of_time():
                row(f"{model} {size}", count, "not run: out of time", "", "", "")
                continue
            row(f"{model} {size}", count, *timed_step(f"{model}_{size}", count))
    return True


def timed_step(name: str, count: int) -> tuple:
    fields = {
        "train.global_batch": BATCH,
        "train.microbatch": None,
        "model.attention.steps": count,
        "model.mlp.steps": count,
    }
    name, fields = (name.replace("tiny", "162m"), fields | MODEL) if TINY else (name, fields)
    config = load_config(str(CONFIGS / f"{name}.py"), fields)
    shape = (BATCH, POSITIONS + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.model.vocab_size)
    state, batch = jax.jit(lambda: initial_state(config))(), {"tokens": tokens}
    start = time.perf_counter()
    step = jax.jit(make_train_step(config, 1000), donate_argnums=0).lower(state, batch).compile()
    compiling = time.perf_counter() - start
    times = []
    for _ in range(2 if TINY else 12):
        start = time.perf_counter()
        state, measured = step(state, batch)
        jax.block_until_ready(measured)
        times.append(time.perf_counter() - start)
    seconds = median(times[1:])
    rate = BATCH * POSITIONS / seconds
    flops = training_flops_per_token(config.model, config.data.context)
    share = mfu(rate, flops, jax.devices()[:1])
    shown = "unknown peak" if share is None else f"{100 * share:.1f} %"
    return f"{seconds * 1e3:,.1f}", f"{rate:,.0f}", shown, f"{compiling:.0f}"


def table(title: str, *cells: str) -> None:
    print(f"\n**{title}** (jax {jax.__version__}, {jax.devices()[0].device_kind})\n")
    row(*cells)
    row(*["---"] * len(cells))


def row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    parts = {f.__name__: f for f in (check, attention, steps)}
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")] or list(parts)
    if unknown := [name for name in wanted if name not in parts]:
        sys.exit(f"no such part: {', '.join(unknown)}\n\n{__doc__}")
    if not TINY and jax.default_backend() != "gpu":
        sys.exit(f"this needs a GPU; JAX has {jax.default_backend()} (--tiny runs on a CPU)")
    sys.exit(0 if all([parts[name]() for name in wanted]) else 1)

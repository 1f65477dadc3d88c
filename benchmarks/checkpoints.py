"""The cost of checkpoints and restarts: `benchmarks/checkpoints.py NAME…`; without names, all.

saving     steps while a checkpoint is written in the background, against steps alone
restoring  seconds to check and to read a checkpoint, by its size
starting   from `cem train` to its first step, with a cold and with a warm compile cache
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from run import SIZE, config, small_dataset, stepper, table

from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.integrity import find_damage
from cem_jax.runs.position import Position

SAVES = 24
STEPS = 8  # steps per block, which begins with a save or has none
ROOT = Path(__file__).parents[1]


def saving() -> None:
    step = stepper(
        config({"train.global_batch": 2, "data.context": 64})
    )  # short steps, whole state
    jax.block_until_ready(step())
    seconds = {"saving": [], "not saving": []}
    blocking, spans = [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Writer(folder, keep=1, keep_best=False)
        for block in range(2 * SAVES):
            save = block % 2 == 0
            began = time.perf_counter()
            if save:
                checkpoints.save(step.state, Position(block))
                blocking.append(time.perf_counter() - began)
            for _ in range(STEPS):
                still = save and not _is_done(folder, block)
                start = time.perf_counter()
                jax.block_until_ready(step())
                if still == save:  # steps after a save's end count for neither side
                    seconds["saving" if save else "not saving"].append(time.perf_counter() - start)
            if save:
                checkpoints.wait()
                spans.append(time.perf_counter() - began)
        size = _bytes(Path(folder) / str(2 * SAVES - 2))
        checkpoints.close()
    both = {name: median(values) for name, values in seconds.items()}
    row = (
        f"{SAVES} of {size / 1e6:.0f} MB",
        f"{len(seconds['saving'])}, {both['saving'] * 1e3:.0f} ms",
        f"{len(seconds['not saving'])}, {both['not saving'] * 1e3:.0f} ms",
        f"{both['saving'] / both['not saving']:.3f}",
        f"{median(blocking) * 1e3:.0f} ms",
        f"{median(spans):.2f} s",
    )
    head = ("saves", "steps while saving", "steps without", "ratio", "held up", "until complete")
    table("saving", head, [row])


def restoring() -> None:
    rows = []
    for dim, layers in ((128, 4), (256, 4), (512, 8)):
        c = config({"model.dim": dim, "model.layers": layers, "model.mlp.dim": 2 * dim})
        state = stepper(c).state
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        with tempfile.TemporaryDirectory() as folder:
            with Writer(folder, keep=1, keep_best=False) as checkpoints:
                checkpoints.save(state, Position(1))
            path, whole, sums = Path(folder) / "1", [], []
            for _ in range(5):
                with Writer(folder, keep=1, keep_best=False) as checkpoints:
                    began = time.perf_counter()
                    jax.block_until_ready(checkpoints.restore(None, abstract)[0])
                    whole.append(time.perf_counter() - began)
                    began = time.perf_counter()
                    assert find_damage(checkpoints.directory / "1") is None
                    sums.append(time.perf_counter() - began)
            megabytes = _bytes(path) / 1e6
        seconds = median(whole)
        rows.append(
            (
                f"{megabytes:.1f}",
                f"{seconds:.2f} s",
                f"{megabytes / seconds:.0f}",
                f"{median(sums):.2f} s",
            )
        )
    table("restoring", ("checkpoint, MB", "restore", "MB/s", "of it the sums"), rows)


def starting() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = small_dataset(Path(folder))
        seconds = {"cold": [], "warm": []}
        for round_index in range(3):
            cache = Path(folder) / f"cache{round_index}"
            for state in seconds:
                seconds[state].append(_until_first_step(Path(folder), data, cache))
        rows.append(
            (
                *(f"{median(values):.1f} s" for values in seconds.values()),
                f"{median(seconds['cold']) / median(seconds['warm']):.2f}",
            )
        )
    table("starting", ("cold cache", "warm cache", "ratio"), rows)


def _until_first_step(folder: Path, data: str, cache: Path) -> float:
    workdir = Path(tempfile.mkdtemp(dir=folder))
    fields = SIZE | {
        "data.path": data,
        "train.global_batch": 4,
        "log.compile_cache": cache,
        "log.every": 1,
        "log.tensorboard": "false",
    }
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "cem_jax", "train", "--workdir", str(workdir), *flags]
    command += ["--config", str(ROOT / "configs" / "base.py")]
    metrics = workdir / "metrics.jsonl"
    began = time.perf_counter()
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        took = time.perf_counter() - began
        if process.poll() is not None:
            sys.exit(f"it ended before its first step:\n{process.stderr.read()}")
        process.kill()
    return took


def _is_done(folder: str, step: int) -> bool:
    return (Path(folder) / str(step)).exists()


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


BENCHMARKS = {function.__name__: function for function in (saving, restoring, starting)}

if __name__ == "__main__":
    for name in sys.argv[1:] or BENCHMARKS:
        BENCHMARKS[name]()

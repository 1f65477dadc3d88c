"""The runs of a soak: the model, the devices, and one attempt at training."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
GRACE = 60
FIELDS = {
    "model.vocab_size": 320,
    "model.dim": 64,
    "model.layers": 2,
    "model.attention.heads": 2,
    "model.mlp.dim": 96,
    "data.context": 64,
    "train.global_batch": 8,
    "train.steps": 300,
    "train.compute_dtype": "float32",
    "train.stall_minutes": 2,
    "optimizer.learning_rate": 0.003,
    "checkpoint.every": 20,
    "checkpoint.keep": 10_000,
    "checkpoint.grace_seconds": GRACE,
    "eval.every": 50,
    "eval.batches": 2,
    "log.every": 1,
    "log.tensorboard": "false",
}


class Mesh(NamedTuple):
    """Processes, devices per process, and the layout of the devices."""

    processes: int
    devices: int
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        return (
            f"{self.processes} × {self.devices} devices, data {self.data} fsdp {self.fsdp} "
            f"tensor {self.tensor}"
        )


MESHES = (
    Mesh(1, 1),
    Mesh(1, 2, data=2),
    Mesh(1, 4, fsdp=2, tensor=2),
    Mesh(2, 1, data=2),
    Mesh(2, 1, fsdp=2),
    Mesh(2, 2, fsdp=2, tensor=2),
)


def dataset(folder: Path) -> Path:
    """Prepare generated text, so little that a run passes over it several times."""
    from cem_jax.data.corpus.prepare import prepare
    from cem_jax.data.corpus.tokenizer_training import train_tokenizer

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeimnorstu", k=rng.randint(2, 6))) for _ in range(60)]
    for split, count in (("train", 400), ("validation", 60)):
        file = folder / "corpus" / split / "a.jsonl"
        file.parent.mkdir(parents=True)
        texts = [" ".join(rng.choices(words, k=rng.randint(5, 60))) + "\n" for _ in range(count)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus, model = str(folder / "corpus"), folder / "t.model"
    train_tokenizer([corpus], model, 320, out=sys.stderr)
    prepare([corpus], model, folder / "data")
    return folder / "data"


class Attempt:
    """The processes of one `cem train`; the rows each consumes are logged beside the run."""

    def __init__(
        self, workdir: Path, data: Path, mesh: Mesh, *, seed: int, stop_at: int | None = None
    ):
        self.workdir, self.mesh = workdir, mesh
        self._began, self._sent = time.time(), 0.0
        logs = logs_of(workdir)
        logs.mkdir(parents=True, exist_ok=True)
        number = len(list(logs.glob("*.txt")))
        self._consumed, self._outputs, self.processes = [], [], []
        fields = FIELDS | {"data.path": str(data), "seed": seed}
        fields |= {f"mesh.{axis}": getattr(mesh, axis) for axis in ("data", "fsdp", "tensor")}
        fields |= {"log.compile_cache": str(data.parent / "compiled")}
        fields |= {} if stop_at is None else {"checkpoint.keep_every": stop_at}
        flags = [f"--config.{name}={value}" for name, value in fields.items()]
        flags += ["--config", str(ROOT / "configs" / "base.py"), "--workdir", str(workdir)]
        port = _free_port()
        for index in range(mesh.processes):
            self._consumed.append(logs / f"{number:03}-{index}.jsonl")
            self._outputs.append(logs / f"{number:03}-{index}.txt")
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(mesh.devices),
            }
            if mesh.processes > 1:
                environment |= {
                    "CEM_COORDINATOR": f"127.0.0.1:{port}",
                    "CEM_PROCESSES": str(mesh.processes),
                    "CEM_PROCESS": str(index),
                }
            worker = Path(__file__).with_name("soak_worker.py")
            with self._outputs[-1].open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, str(worker), str(self._consumed[-1]), *flags],
                    env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                )  # fmt: skip
            self.processes.append(process)

    def send(self, number: int, indices: Iterable[int]) -> None:
        """Send a signal to some of the processes."""
        self._sent = time.time()
        for index in indices:
            if self.processes[index].poll() is None:
                self.processes[index].send_signal(number)

    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def sleep(self, seconds: float) -> bool:
        """Wait for the seconds; return whether all processes are still running."""
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end:
            time.sleep(0.05)
        return self.running()

    def await_steps(self, count: int) -> bool:
        """Wait for `count` steps; return whether all processes are still running."""
        while self.running() and self.steps() < count:
            time.sleep(0.02)
        return self.running()

    def await_checkpoint(self, step: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.running() and step not in saved_steps(self.workdir):
            if time.monotonic() > end:
                break
            time.sleep(0.1)

    def wait(self, seconds: float) -> list[int | None]:
        """Return the exit statuses; None for processes that had to be killed after the seconds."""
        end = time.monotonic() + seconds
        statuses: list[int | None] = []
        for process in self.processes:
            try:
                statuses.append(process.wait(max(end - time.monotonic(), 0.01)))
            except subprocess.TimeoutExpired:
                statuses.append(None)
        self._ended = time.time()
        for process in self.processes:
            process.kill()
            process.wait()
        return statuses

    def seconds_to_end(self) -> float:
        """Return the time from the signal until all had ended."""
        return self._ended - self._sent

    def steps(self) -> int:
        """Return the number of steps that the first process has begun."""
        file = self._consumed[0]
        return file.read_text().count("\n") if file.exists() else 0

    def output(self) -> str:
        return "\n".join(path.read_text() for path in self._outputs)


def logs_of(workdir: Path) -> Path:
    return workdir.with_name(f"{workdir.name}-logs")


def saved_steps(workdir: Path) -> list[int]:
    """Return the steps with a complete checkpoint."""
    lists = (workdir / "checkpoints").glob("*/checksums.sha256")
    return sorted(int(path.parent.name) for path in lists if path.parent.name.isdecimal())


def final_loss(workdir: Path) -> float:
    """Return the loss of the last validation, over the whole split."""
    from cem_jax.runs.metrics import read_metrics

    return [line for line in read_metrics(workdir) if line["kind"] == "eval"][-1]["loss"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]

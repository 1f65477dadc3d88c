"""Start `cem train` in several local processes, for tests."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import tiny

from cem_jax.runs.integrity import LIST_NAME
from cem_jax.runs.metrics import read_metrics

ROOT = Path(__file__).parents[2]
PATIENCE = 240  # seconds: many times the longest wait on an idle machine


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def flags(workdir: Path, dataset: Path, **changes) -> list[str]:
    """Return flags of `cem train` for the tiny configuration; `train__steps=9` sets train.steps."""
    fields = tiny.FIELDS | {"data.path": str(dataset)}
    fields |= {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["--config", tiny.BASE, "--workdir", str(workdir), *overrides]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", **variables}


class Group:
    """Processes 0 … count − 1, with output in files; killed at the end of the block.

    `given`: flags by process instead of the common ones; None: it is not started.
    `program`: what Python runs instead of `-m cem_jax`.
    """

    def __init__(
        self, folder: Path, count: int, arguments: list[str], given=None, program=("-m", "cem_jax")
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._outputs = [folder / f"process-{index}.txt" for index in range(count)]
        self.processes = []
        coordinator = f"127.0.0.1:{free_port()}"
        for index, output in enumerate(self._outputs):
            own = (given or {}).get(index, arguments)
            if own is None:
                self.processes.append(None)
                continue
            variables = environment(
                CEM_COORDINATOR=coordinator, CEM_PROCESSES=str(count), CEM_PROCESS=str(index)
            )
            with output.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, *program, "train", *own],
                    env=variables, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                )  # fmt: skip
            self.processes.append(process)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        for process in filter(None, self.processes):
            process.kill()
            process.wait()

    def send(self, number: int, *indices: int) -> None:
        for index in indices:
            self.processes[index].send_signal(number)

    def wait(self) -> list[int | None]:
        """Return the exit statuses; None for a process that was not started."""
        return [process and process.wait(PATIENCE) for process in self.processes]

    def output(self, index: int) -> str:
        return self._outputs[index].read_text()

    def await_steps(self, workdir: Path, count: int) -> None:
        """Wait until the run in `workdir` has logged `count` steps."""
        self._until(lambda: len(losses(workdir)) >= count)

    def await_checkpoint(self, workdir: Path) -> None:
        """Wait until there is a complete checkpoint."""
        self._until(lambda: any(workdir.glob(f"checkpoints/*0/{LIST_NAME}")))

    def _until(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, [self.output(i) for i in range(len(self._outputs))]
            ended = [p.poll() for p in self.processes]
            assert ended == [None] * len(ended), [self.output(i) for i in range(len(ended))]
            time.sleep(0.02)


def trained(folder: Path, count: int, arguments: list[str]) -> Group:
    """Return a group that has run to the end."""
    with Group(folder, count, arguments) as group:
        statuses = group.wait()
        assert statuses == [0] * count, "\n".join(map(group.output, range(count)))
    return group


def losses(workdir: Path, kind: str = "train") -> dict[int, float]:
    """Return the loss of each step so far."""
    if not (workdir / "metrics.jsonl").exists():
        return {}
    return {line["step"]: line["loss"] for line in read_metrics(workdir) if line["kind"] == kind}


KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP

"""`cem train`: the loop around the step, from the first batch or the newest checkpoint to the last.

The device is kept ahead of the host: a step is dispatched before the one before it is read.
With several processes all run this loop in step; the first one alone writes and reports.
"""

import base64
import io
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from cem_jax.config import Config, load_config
from cem_jax.errors import RunFailed, UserError
from cem_jax.parallel import distributed
from cem_jax.parallel.cluster import find_cluster
from cem_jax.parallel.mesh import in_mesh
from cem_jax.train.checkpoint import Checkpointer
from cem_jax.train.flops import mfu, training_flops_per_token
from cem_jax.train.metrics import MetricsWriter, SilentMetrics
from cem_jax.train.progress import Progress
from cem_jax.train.rundir import (
    agreed_facts,
    check_same_run,
    only_writer,
    read_config,
    with_absolute_paths,
    write_run_files,
)
from cem_jax.train.setup import Setup, fresh_state, jitted_step, place_batch, prepare_run
from cem_jax.train.step import StepMetrics, TrainState


def run(args) -> dict[str, Any] | None:
    """`cem train`. None in all processes but the first."""
    config = load_config(args.config, args.overrides)
    cluster = find_cluster(args.coordinator, args.processes, args.process)
    with distributed.joined(cluster, config.train.stall_minutes):
        result = train(config, Path(args.workdir))
        return result if distributed.is_first() else None


def train(config: Config, workdir: Path, *, stream=None) -> dict[str, Any]:
    """Trains to the end and returns {step, loss, checkpoint}.

    Continues a run that `workdir` holds. Raises UserError, before anything is written, for what the
    user got wrong; RunFailed when the run cannot go on.
    """
    stream = stream or (sys.stderr if distributed.is_first() else _Nowhere())
    config = with_absolute_paths(config)
    setup = prepare_run(config)
    check_same_run(workdir, config)
    fingerprint = setup.mixture.fingerprint
    distributed.agree(lambda: agreed_facts(config, fingerprint, _newest(workdir)))
    total = config.total_steps
    keep = dict(keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best)
    with only_writer(workdir), Checkpointer(workdir / "checkpoints", **keep) as checkpointer:
        state, extra = _start(setup, checkpointer)
        start = int(state.step)
        distributed.progress(f"step {start}, before the first one here")
        if start >= total:
            if distributed.is_first() and read_config(workdir) != config:  # the data has moved
                write_run_files(workdir, config, setup.mixture.load_tokenizer().model_bytes)
            print(f"finished: {workdir} is at step {start} of {total}", file=stream)
            return _result(start, extra.get("loss"), checkpointer)
        if distributed.is_first():
            write_run_files(workdir, config, setup.mixture.load_tokenizer().model_bytes)
        distributed.await_file(workdir / "config.json")
        with _metrics(workdir, config, start) as metrics:
            loop = _Loop(setup, workdir, checkpointer, metrics, stream, extra.get("loss"))
            loop.announce(start)
            with _stopping_signals() as stop:
                loss = loop.run(state, start, stop)
        checkpointer.wait()
        return _result(total, loss, checkpointer)


def _newest(workdir: Path) -> int | None:
    quiet = dict(keep=1, keep_best=False, report=lambda line: None)
    with Checkpointer(workdir / "checkpoints", **quiet) as found:
        return found.latest_step()


class _Nowhere(io.TextIOBase):
    """Takes the progress lines of the processes that report none."""

    def write(self, text: str) -> int:
        return len(text)


def _metrics(workdir: Path, config: Config, start: int) -> MetricsWriter | SilentMetrics:
    if not distributed.is_first():
        return SilentMetrics()
    return MetricsWriter(workdir, tensorboard=config.log.tensorboard, resume_step=start)


def _start(setup: Setup, checkpointer: Checkpointer) -> tuple[TrainState, dict[str, Any]]:
    """The newest sound checkpoint, or step 0."""
    if checkpointer.latest_step() is None:
        return fresh_state(setup), {}
    state, extra, _ = checkpointer.restore(None, setup.state)
    found, now = extra["dataset"], setup.mixture.fingerprint
    if found != now:
        raise _other_dataset(found, now)
    return state, extra


def _other_dataset(found: str, now: str) -> UserError:
    return UserError(
        f"data.path: the run was trained on dataset {found}, this is {now}; resume with the "
        "dataset it began with, or start another --workdir"
    )


def _result(step: int, loss: float | None, checkpointer: Checkpointer) -> dict[str, Any]:
    checkpoint = Path(str(checkpointer.directory)) / str(checkpointer.latest_step())
    return {"step": step, "loss": loss, "checkpoint": str(checkpoint)}


class _Loop:
    """The moving parts of a run."""

    def __init__(self, setup: Setup, workdir: Path, checkpointer, metrics, stream, loss):
        config = setup.config
        self.setup, self.config, self.workdir = setup, config, workdir
        self.checkpointer, self.metrics, self.stream = checkpointer, metrics, stream
        self.total = config.total_steps
        self.loss = loss
        self.validation_loss: float | None = None
        self.progress = Progress(self.total, config.tokens_per_step, stream)
        self.rate = self.progress.rate
        self.last_save = time.monotonic()
        self.tracing = False
        self.wishes = distributed.Wishes(setup.mesh)
        step = jitted_step(config, setup.mesh, setup.state, self.total)
        self.step = in_mesh(setup.mesh, distributed.together("the training step", step))

    def announce(self, start: int) -> None:
        devices, count = jax.device_count(), distributed.processes()
        kind = jax.devices()[0].device_kind
        what = f"resuming at step {start}" if start else "starting"
        self.progress.message(
            f"{what} of {self.total} in {self.workdir}: {self.config.train.global_batch} sequences "
            f"of {self.config.data.context} tokens a step, {self.config.train.compute_dtype}, "
            f"{devices} × {kind}" + (f" in {count} processes" if count > 1 else "")
        )

    def run(self, state: TrainState, start: int, stop: "_Stop") -> float:
        """Steps `start` … total − 1, with what belongs between them. Returns the last loss."""
        batches = self.setup.loader.iterate(start)
        pending: tuple[int, StepMetrics] | None = None
        try:
            for step in range(start, self.total):
                with self.rate.waiting():
                    _, batch = next(batches)
                self._profile(step)
                state, measured = self.step(state, place_batch(batch, self.setup.mesh))
                if pending is not None:
                    self._read(*pending)
                pending = step, measured
                if self._pause_after(step, stop):
                    self._read(*pending)
                    pending = None
                    self._between(state, step)
        except jax.errors.JaxRuntimeError as error:
            distributed.lost(error)
            raise
        finally:
            batches.close()
            if self.tracing:
                jax.profiler.stop_trace()
            self.progress.finish()
        return self.loss

    def _read(self, step: int, measured: StepMetrics) -> None:
        """Fetch a step's scalars, by now computed; log them, and stop a run that went bad."""
        measured = jax.device_get(measured)
        self.rate.step_done()
        done = step + 1
        distributed.progress(f"step {done}")
        self.loss = float(measured.loss)
        learning_rate = float(measured.learning_rate)
        if measured.bad_steps:
            self.progress.message(
                f"step {done}: loss {self.loss}, gradient norm {float(measured.grad_norm)}: not "
                "finite, the update was not applied"
            )
            self.metrics.write("event", done, event="skipped", in_a_row=int(measured.bad_steps))
        if done % self.config.log.every == 0 or done == self.total:
            self.metrics.write("train", done, **self._values(done, measured))
        self.progress.update(done, loss=self.loss, learning_rate=learning_rate)
        if measured.bad_steps >= self.config.train.max_bad_steps:
            last = self.checkpointer.latest_step()
            saved = f"the last checkpoint is step {last}" if last else "there is no checkpoint yet"
            raise RunFailed(
                f"step {done}: {int(measured.bad_steps)} non-finite steps in a row "
                f"(train.max_bad_steps); {saved}"
            )

    def _values(self, done: int, measured: StepMetrics) -> dict[str, Any]:
        rate = self.rate
        per_token = training_flops_per_token(self.config.model, self.config.data.context)
        values = dict(
            loss=self.loss,
            learning_rate=float(measured.learning_rate),
            grad_norm=float(measured.grad_norm),
            tokens=done * self.config.tokens_per_step,
            tokens_per_second=rate.tokens_per_second,
            step_seconds=rate.step_seconds,
            data_wait_fraction=rate.data_wait_fraction,
            skipped_steps=int(measured.skipped_steps),
            epoch=self.setup.loader.epoch(done),
        )
        if rate.tokens_per_second is not None:
            share = mfu(rate.tokens_per_second, per_token, jax.devices())
            values |= {} if share is None else {"mfu": share}
        return values

    def _pause_after(self, step: int, stop: "_Stop") -> bool:
        done = step + 1
        minutes = self.config.checkpoint.every_minutes
        late = minutes is not None and time.monotonic() - self.last_save >= 60 * minutes
        # Clocks and signals differ between processes; what follows from them must not.
        self.stopping, late = self.wishes.settle(stop.signal or 0, late)
        self.save_is_due = (
            done == self.total
            or bool(self.stopping)
            or done % self.config.checkpoint.every == 0
            or bool(late)
        )
        self.eval_is_due = done == self.total or done % self.config.eval.every == 0
        if self.stopping:
            self.eval_is_due = False
        return self.save_is_due or self.eval_is_due

    def _between(self, state: TrainState, step: int) -> None:
        """Validation and checkpoint after `step`."""
        done = step + 1
        with self.rate.paused():
            if self.eval_is_due:
                self._validate(state, done)
            if self.save_is_due:
                self._save(state, done)
        self.checkpointer.check()
        if self.stopping:
            with self.rate.paused():
                self.checkpointer.wait()
            self.progress.message(
                f"stopped at step {done} of {self.total}; the same command resumes"
            )
            raise SystemExit(128 + self.stopping)

    def _validate(self, state: TrainState, done: int) -> None:
        report = lambda batches: distributed.progress(f"validation after step {done}")
        result = self.setup.evaluator(state.params, report, whole=done == self.total)
        self.validation_loss = result["loss"]
        self.metrics.write("eval", done, split=self.config.eval.split, **result)
        bits = result["bits_per_byte"]
        shown = "" if bits is None else f", {bits:.4f} bits per byte"
        self.progress.message(
            f"step {done}: {self.config.eval.split} loss {result['loss']:.4f}, perplexity "
            f"{result['perplexity']:.2f}{shown}"
        )

    def _save(self, state: TrainState, done: int) -> None:
        extra = {
            "config": self.config.to_dict(),
            "dataset": self.setup.mixture.fingerprint,
            "tokenizer_hash": self.setup.mixture.tokenizer_hash,
            "separator": self.setup.mixture.separator,
            "tokenizer": base64.b64encode(self.setup.mixture.load_tokenizer().model_bytes).decode(),
            "windows_consumed": done * self.config.train.global_batch,
            "loss": self.loss if math.isfinite(self.loss) else None,
        }
        metric = self.validation_loss if self.eval_is_due else None
        self.checkpointer.save(done, state, extra, metric)
        self.last_save = time.monotonic()
        self.wishes.forget()
        distributed.progress(f"checkpoint {done}")

    def _profile(self, step: int) -> None:
        if not self.config.log.profile_steps or not distributed.is_first():
            return
        first, last = self.config.log.profile_steps
        wanted = first <= step <= last  # a run may begin or end within them
        if wanted and not self.tracing:
            jax.profiler.start_trace(str(self.workdir / "profile"))
        elif self.tracing and not wanted:
            jax.profiler.stop_trace()
        self.tracing = wanted


class _Stop:
    """The signal that asked the run to stop, if one did."""

    signal: int | None = None


@contextmanager
def _stopping_signals() -> Iterator[_Stop]:
    """SIGINT and SIGTERM ask for a checkpoint after the step; a second one ends at once."""
    stop = _Stop()
    before = {}

    def handle(number, _frame):
        stop.signal = number
        for one, handler in before.items():
            signal.signal(one, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread, where handlers cannot be set
        pass
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

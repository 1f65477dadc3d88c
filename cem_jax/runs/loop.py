"""The training loop: steps, and validation, checkpoints and stopping between them.

Each step is dispatched before the previous one's results are read, so that the device never waits.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TextIO

import jax

from cem_jax.config import Config
from cem_jax.distributed import session
from cem_jax.errors import RunFailed
from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.metrics import MetricsWriter, SilentMetrics
from cem_jax.runs.position import Position
from cem_jax.runs.progress import Progress
from cem_jax.runs.resume import Course
from cem_jax.runs.setup import Setup
from cem_jax.runs.signals import Stop
from cem_jax.sharding.mesh import in_mesh
from cem_jax.storage.paths import AnyPath
from cem_jax.train.flops import mfu, training_flops_per_token
from cem_jax.train.probe import make_probe
from cem_jax.train.setup import jitted_step, place_batch
from cem_jax.train.step import StepMetrics, TrainState


class Due(NamedTuple):
    """Work due between two steps; `signal`: the signal to stop for, or 0."""

    save: bool = False
    validation: bool = False
    energies: bool = False
    signal: int = 0


def due_after(done: int, total: int, config: Config, *, signal: int, late: bool) -> Due:
    """Return the work due after step `done`; `late`: checkpoint.every_minutes have passed."""
    c, every = config.checkpoint, config.log.energies_every
    milestone = c.keep_every is not None and done % c.keep_every == 0
    ends = done == total
    return Due(
        save=ends or bool(signal) or late or milestone or done % c.every == 0,
        validation=ends or done % config.eval.every == 0,
        energies=every > 0 and done % every == 0,
        signal=signal,
    )


class Loop:
    """The state of a running training and the methods that advance it."""

    def __init__(
        self,
        setup: Setup,
        workdir: AnyPath,
        checkpoints: Writer,
        metrics: MetricsWriter | SilentMetrics,
        course: Course,
        stop: Stop,
        stream: TextIO,
    ):
        config = setup.config
        self.setup, self.config, self.workdir = setup, config, workdir
        self.checkpoints, self.metrics, self.stop, self.course = checkpoints, metrics, stop, course
        self.flops_per_token = training_flops_per_token(config.model, config.data.context)
        self.progress = Progress(course.total, config.tokens_per_step, stream)
        self.rate = self.progress.rate
        self.last_save = time.monotonic()
        self.loss: float | None = None
        self.wishes = session.current().wishes(setup.mesh)
        step = jitted_step(config, setup.mesh, setup.state, course.total, course.ahead)
        self.step = in_mesh(setup.mesh, session.together("the training step", step))
        self.probe = make_probe(config, setup.mesh) if config.log.energies_every else None

    def announce(self) -> None:
        """Print what is about to run, and where."""
        start, total = self.course.start, self.course.total
        devices, count = jax.device_count(), session.current().processes
        kind = jax.devices()[0].device_kind
        self.progress.message(
            f"{'resuming' if start else 'starting'} at step {start} of {total} in "
            f"{self.workdir}: {self.config.train.global_batch} sequences of "
            f"{self.config.data.context} tokens per step, {self.config.train.compute_dtype}, "
            f"{devices} × {kind}" + (f" in {count} processes" if count > 1 else "")
        )
        if start < total:
            flops = self.config.tokens_per_step * self.flops_per_token
            self.progress.message(f"compiling, then {flops / 1e12:,.3g} TFLOP per step")

    def run(
        self, state: TrainState, position: Position, after_step: Callable[[int], None]
    ) -> Position:
        """Train from `position` to the end and return the final position.

        `after_step` is called after each step with the number of steps done.
        """
        self.loss = position.loss
        batches = self.setup.loader.iterate(position.step)
        profiler = _Profiler(self.config, self.workdir)
        pending: tuple[int, StepMetrics] | None = None
        try:
            if position.owes_validation:
                self.stop.something_to_save()
                position = self._pause(Due(save=True, validation=True), state, None, position)
            for step in range(position.step, self.course.total):
                with self.rate.waiting():
                    batch = next(batches)
                profiler.before(step)
                batch = place_batch(batch, self.setup.mesh)
                state, measured = self.step(state, batch)
                if pending is not None:
                    self._read(*pending)
                pending = step + 1, measured
                after_step(step + 1)
                due = self._due(step + 1)
                if any(due):
                    self._read(*pending)
                    pending = None
                    position = self._pause(due, state, batch, self._at(position, step + 1))
        except jax.errors.JaxRuntimeError as error:
            session.current().lost(error)
            raise
        finally:
            batches.close()
            profiler.stop()
            self.progress.finish()
        return position

    def _at(self, position: Position, done: int) -> Position:
        """Return `position` moved to `done` steps."""
        return replace(
            position,
            step=done,
            tokens=self.course.tokens(done, self.config),
            windows_consumed=self.setup.loader.consumed(done),
            loss=self.loss if self.loss is not None and math.isfinite(self.loss) else None,
        )

    def _read(self, done: int, measured: StepMetrics) -> None:
        """Fetch and log a step's scalars; stop after too many non-finite steps."""
        measured = jax.device_get(measured)
        self.rate.step_done()
        self.stop.something_to_save()
        self.checkpoints.check()
        session.current().progress(f"step {done}")
        self.loss = float(measured.loss)
        if measured.bad_steps:
            self.progress.message(
                f"step {done}: loss {self.loss}, gradient norm {float(measured.grad_norm)}: not "
                "finite, the update was not applied"
            )
            self.metrics.write("event", done, event="skipped", in_a_row=int(measured.bad_steps))
        if done % self.config.log.every == 0 or done == self.course.total:
            self.metrics.write("train", done, **self._values(done, measured))
        self.progress.update(done, loss=self.loss, learning_rate=float(measured.learning_rate))
        if measured.bad_steps >= self.config.train.max_bad_steps:
            last = self.checkpoints.latest_step()
            saved = f"the last checkpoint is step {last}" if last else "there is no checkpoint yet"
            raise RunFailed(
                f"step {done}: {int(measured.bad_steps)} non-finite steps in a row "
                f"(train.max_bad_steps); {saved}"
            )

    def _values(self, done: int, measured: StepMetrics) -> dict[str, Any]:
        rate = self.rate
        values = dict(
            loss=self.loss,
            learning_rate=float(measured.learning_rate),
            grad_norm=float(measured.grad_norm),
            tokens=self.course.tokens(done, self.config),
            tokens_per_second=rate.tokens_per_second,
            step_seconds=rate.step_seconds,
            data_wait_fraction=rate.data_wait_fraction,
            skipped_steps=int(measured.skipped_steps),
            epoch=self.setup.loader.epoch(done),
        )
        if len(self.setup.mixture.sources) > 1:
            values["sources"] = self.setup.loader.sources(done)
        if rate.tokens_per_second is not None:
            share = mfu(rate.tokens_per_second, self.flops_per_token, jax.devices())
            values |= {} if share is None else {"mfu": share}
        return values

    def _due(self, done: int) -> Due:
        minutes = self.config.checkpoint.every_minutes
        late = minutes is not None and time.monotonic() - self.last_save >= 60 * minutes
        # Clocks and signals differ between processes; the decisions must not.
        signal, late = self.wishes.settle(self.stop.signal or 0, late)
        return due_after(done, self.course.total, self.config, signal=signal, late=bool(late))

    def _pause(
        self, due: Due, state: TrainState, batch: dict[str, jax.Array] | None, position: Position
    ) -> Position:
        """Do the work due at `position`; exit if a signal asked for it.

        batch: the last step's; the energy probe uses some of its rows.
        """
        done, signal, metric = position.step, due.signal, None
        owed = due.validation
        with self.rate.paused():
            if due.energies:
                self.metrics.write("energies", done, **self.probe(state.params, batch))
                session.current().progress(f"energies after step {done}")
            if owed and not signal:
                metric, signal = self._validate(state, done)
                owed = bool(signal)
            position = replace(position, owes_validation=owed)
            if due.save or signal:
                self._save(state, position, metric)
        self.checkpoints.check()
        if signal:
            with self.rate.paused():
                self.checkpoints.wait()
            self.progress.message(
                f"stopped at step {done} of {self.course.total}; the same command resumes"
            )
            raise SystemExit(128 + signal)
        return position

    def _validate(self, state: TrainState, done: int) -> tuple[float | None, int]:
        """Validate; return (the loss that checkpoints are compared by, 0), or (None, signal).

        A signal interrupts validation in all processes at the same batch.
        """
        evaluator, whole = self.setup.evaluator, done == self.course.total
        of = evaluator.batches(whole=whole)

        def report(batches: int) -> None:
            session.current().progress(f"validation after step {done}")
            self.progress.between(f"step {done}: validation, batch {batches}/{of}")
            signal, _ = self.wishes.settle(self.stop.signal or 0, 0)
            if signal:
                raise _BrokenOff(signal)

        try:
            result, common = evaluator.with_common(state.params, report, whole=whole)
        except _BrokenOff as by:
            return None, by.args[0]
        self.metrics.write("eval", done, split=self.config.eval.split, **result)
        bits = result["bits_per_byte"]
        shown = "" if bits is None else f", {bits:.4f} bits per byte"
        self.progress.message(
            f"step {done}: {self.config.eval.split} loss {result['loss']:.4f}, perplexity "
            f"{result['perplexity']:.2f}{shown}"
        )
        return common, 0

    def _save(self, state: TrainState, position: Position, metric: float | None) -> None:
        if session.current().is_first and not (self.workdir / "config.json").exists():
            raise RunFailed(
                f"{self.workdir}: config.json is gone; the directory was removed or replaced while "
                "the run was using it"
            )
        self.metrics.sync()
        self.checkpoints.save(state, position, metric, self.setup.evaluator.measure)
        self.last_save = time.monotonic()
        self.wishes.forget()
        session.current().progress(f"checkpoint {position.step}")


class _Profiler:
    """Profiles the steps of log.profile_steps; a run may begin or end within them."""

    def __init__(self, config: Config, workdir: AnyPath):
        self._steps = config.log.profile_steps if session.current().is_first else ()
        self._folder, self._tracing = str(workdir / "profile"), False

    def before(self, step: int) -> None:
        wanted = bool(self._steps) and self._steps[0] <= step <= self._steps[1]
        if wanted and not self._tracing:
            jax.profiler.start_trace(self._folder)
        elif self._tracing and not wanted:
            jax.profiler.stop_trace()
        self._tracing = wanted

    def stop(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()


class _BrokenOff(Exception):
    """A signal (the argument) interrupted validation."""

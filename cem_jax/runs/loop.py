"""The loop around the training step and what belongs between steps: validation, checkpoints, ends.

The device is kept ahead of the host: a step is dispatched before the one before it is read.
"""

import base64
import math
import time
from typing import Any

import jax
from etils import epath

from cem_jax.distributed import session
from cem_jax.errors import RunFailed
from cem_jax.runs.init_from import ORIGIN
from cem_jax.runs.progress import Progress
from cem_jax.runs.resume import length, surplus
from cem_jax.runs.signals import Stop
from cem_jax.sharding.mesh import in_mesh
from cem_jax.train.flops import mfu, training_flops_per_token
from cem_jax.train.probe import make_probe
from cem_jax.train.setup import Setup, jitted_step, place_batch
from cem_jax.train.step import StepMetrics, TrainState


class Loop:
    """The moving parts of a run."""

    def __init__(
        self, setup: Setup, workdir: epath.Path, checkpointer, metrics, stream, stop: Stop, extra
    ):
        config = setup.config
        self.setup, self.config, self.workdir = setup, config, workdir
        self.checkpointer, self.metrics, self.stop = checkpointer, metrics, stop
        self.total, ahead = length(config, extra)
        self.flops_per_token = training_flops_per_token(config.model, config.data.context)
        self.loss: float | None = extra.get("loss")
        self.origin = {ORIGIN: extra[ORIGIN]} if ORIGIN in extra else {}
        # what the steps so far had more than steps as they are now: the batch may have changed
        self.tokens_before = surplus(config, extra)
        self.comparable_loss: float | None = None
        self.progress = Progress(self.total, config.tokens_per_step, stream)
        self.rate = self.progress.rate
        self.last_save = time.monotonic()
        self.tracing = False
        self.wishes = session.Wishes(setup.mesh)
        step = jitted_step(config, setup.mesh, setup.state, self.total, ahead)
        self.step = in_mesh(setup.mesh, session.together("the training step", step))
        self.probe = make_probe(config, setup.mesh) if config.log.energies_every else None

    def announce(self, start: int) -> None:
        devices, count = jax.device_count(), session.processes()
        kind = jax.devices()[0].device_kind
        self.progress.message(
            f"{'resuming' if start else 'starting'} at step {start} of {self.total} in "
            f"{self.workdir}: {self.config.train.global_batch} sequences of "
            f"{self.config.data.context} tokens a step, {self.config.train.compute_dtype}, "
            f"{devices} × {kind}" + (f" in {count} processes" if count > 1 else "")
        )
        if start < self.total:
            flops = self.config.tokens_per_step * self.flops_per_token
            self.progress.message(f"compiling, then {flops / 1e12:,.3g} TFLOP a step")

    def run(self, state: TrainState, start: int, owes_validation: bool) -> float | None:
        """Steps `start` … total − 1, with what belongs between them. Returns the last loss.

        `owes_validation`: a stop came before the validation that belongs to step `start`.
        """
        batches = self.setup.loader.iterate(start)
        pending: tuple[int, StepMetrics] | None = None
        try:
            if owes_validation:
                self.stop.something_to_save()
                self.stopping, self.save_is_due, self.eval_is_due = 0, True, True
                self._between(state, start)
            for step in range(start, self.total):
                with self.rate.waiting():
                    batch = next(batches)
                self._profile(step)
                batch = place_batch(batch, self.setup.mesh)
                state, measured = self.step(state, batch)
                if pending is not None:
                    self._read(*pending)
                pending = step, measured
                if self._pause_after(step):
                    self._read(*pending)
                    pending = None
                    if self.energies_are_due:
                        self._describe(state, batch, step + 1)
                    self._between(state, step + 1)
        except jax.errors.JaxRuntimeError as error:
            session.lost(error)
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
        self.stop.something_to_save()
        self.checkpointer.check()
        done = step + 1
        session.progress(f"step {done}")
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
        values = dict(
            loss=self.loss,
            learning_rate=float(measured.learning_rate),
            grad_norm=float(measured.grad_norm),
            tokens=self.tokens_before + done * self.config.tokens_per_step,
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

    def _pause_after(self, step: int) -> bool:
        done = step + 1
        c = self.config.checkpoint
        late = c.every_minutes is not None and (
            time.monotonic() - self.last_save >= 60 * c.every_minutes
        )
        # Clocks and signals differ between processes; what follows from them must not.
        self.stopping, late = self.wishes.settle(self.stop.signal or 0, late)
        milestone = c.keep_every is not None and done % c.keep_every == 0
        self.eval_is_due = done == self.total or done % self.config.eval.every == 0
        self.save_is_due = (
            done == self.total
            or bool(self.stopping)
            or done % c.every == 0
            or milestone
            or bool(late)
        )
        every = self.config.log.energies_every
        self.energies_are_due = self.probe is not None and done % every == 0
        return self.save_is_due or self.eval_is_due or self.energies_are_due

    def _describe(self, state: TrainState, batch: dict[str, jax.Array], done: int) -> None:
        """How the layers descend after `done` steps, on some of the last one's batch."""
        with self.rate.paused():
            self.metrics.write("energies", done, **self.probe(state.params, batch))
        session.progress(f"energies after step {done}")

    def _between(self, state: TrainState, done: int) -> None:
        """Validation and checkpoint after `done` steps; the end, if a signal asked for it."""
        self.comparable_loss = None
        with self.rate.paused():
            if self.eval_is_due and not self.stopping:
                self.eval_is_due = not self._validate(state, done)
            if self.save_is_due or self.stopping:
                self._save(state, done)
        self.checkpointer.check()
        if self.stopping:
            with self.rate.paused():
                self.checkpointer.wait()
            self.progress.message(
                f"stopped at step {done} of {self.total}; the same command resumes"
            )
            raise SystemExit(128 + self.stopping)

    def _validate(self, state: TrainState, done: int) -> bool:
        """Whether it came to its end: a signal breaks it off, in all processes alike."""

        whole = done == self.total
        of = self.setup.evaluator.batches(whole=whole)

        def report(batches: int) -> None:
            session.progress(f"validation after step {done}")
            self.progress.between(f"step {done}: validation, batch {batches}/{of}")
            self.stopping, _ = self.wishes.settle(self.stop.signal or 0, 0)
            if self.stopping:
                raise _BrokenOff

        try:
            result, common = self.setup.evaluator.with_common(state.params, report, whole=whole)
        except _BrokenOff:
            return False
        self.comparable_loss = common
        self.metrics.write("eval", done, split=self.config.eval.split, **result)
        bits = result["bits_per_byte"]
        shown = "" if bits is None else f", {bits:.4f} bits per byte"
        self.progress.message(
            f"step {done}: {self.config.eval.split} loss {result['loss']:.4f}, perplexity "
            f"{result['perplexity']:.2f}{shown}"
        )
        return True

    def _save(self, state: TrainState, done: int) -> None:
        if session.is_first() and not (self.workdir / "config.json").exists():
            raise RunFailed(
                f"{self.workdir}: config.json is gone; the directory was removed or replaced while "
                "the run was at work in it"
            )
        mixture = self.setup.mixture
        extra = {
            **self.origin,
            "config": self.config.to_dict(),
            "dataset": mixture.fingerprint,
            "tokenizer_hash": mixture.tokenizer_hash,
            "separator": mixture.separator,
            "tokenizer": base64.b64encode(mixture.load_tokenizer().model_bytes).decode(),
            "step": done,
            "tokens": self.tokens_before + done * self.config.tokens_per_step,
            "windows_consumed": self.setup.loader.consumed(done),
            "loss": self.loss if self.loss is not None and math.isfinite(self.loss) else None,
            "owes_validation": self.eval_is_due,
        }
        self.metrics.sync()
        measure = self.setup.evaluator.measure
        self.checkpointer.save(done, state, extra, self.comparable_loss, measure)
        self.last_save = time.monotonic()
        self.wishes.forget()
        session.progress(f"checkpoint {done}")

    def _profile(self, step: int) -> None:
        if not self.config.log.profile_steps or not session.is_first():
            return
        first, last = self.config.log.profile_steps
        wanted = first <= step <= last  # a run may begin or end within them
        if wanted and not self.tracing:
            jax.profiler.start_trace(str(self.workdir / "profile"))
        elif self.tracing and not wanted:
            jax.profiler.stop_trace()
        self.tracing = wanted


class _BrokenOff(Exception):
    """A signal came during a validation."""

"""Train from the first step, or from the newest checkpoint, to the last step.

This module checks, restores and writes everything around the `loop`. With several processes, all
run it in lockstep, and only the first writes and reports.
"""

import base64
import io
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn, TextIO

from cem_jax.config import Config
from cem_jax.distributed import session
from cem_jax.distributed.cluster import Cluster
from cem_jax.errors import UserError
from cem_jax.runs.checkpoints import Info, Reader, Writer
from cem_jax.runs.directory import (
    agreed_facts,
    only_writer,
    present_config,
    require_nothing_lost,
    with_absolute_paths,
    write_run_files,
)
from cem_jax.runs.init_from import initialised_from, require_origin, require_same_start
from cem_jax.runs.loop import Loop
from cem_jax.runs.metrics import MetricsWriter, SilentMetrics
from cem_jax.runs.position import Position
from cem_jax.runs.resume import (
    Course,
    as_recorded,
    changes,
    edited_config,
    report_changes,
    require_same_run,
    require_steps_left,
)
from cem_jax.runs.setup import Setup, prepare_run
from cem_jax.runs.signals import Stop, watched
from cem_jax.storage.paths import AnyPath, is_url, place
from cem_jax.train.setup import fresh_state
from cem_jax.train.step import TrainState


def train_in_processes(
    config: Config,
    workdir: str | os.PathLike[str],
    cluster: Cluster | None,
    *,
    init_from: str | None = None,
) -> dict[str, Any] | None:
    """Call `train` in each of the `cluster`'s processes; return None in all but the first."""
    say = lambda line: print(f"cem: {line}", file=_stderr(), flush=True)
    # Watched while processes connect too: nothing else would end process 1 of a container.
    with (
        watched(Stop(config.checkpoint.grace_seconds, _leave, say)) as stop,
        session.joined(cluster, config.train.stall_minutes),
    ):
        result = train(config, workdir, init_from=init_from, stop=stop)
        return result if session.current().is_first else None


def train(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    init_from: str | None = None,
    stream: TextIO | None = None,
    stop: Stop | None = None,
    after_step: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Train to the end and return {step, loss, checkpoint}.

    Resumes the run in `workdir`, if any; otherwise starts with fresh parameters or those of the
    run in `init_from`.

    Args:
      stream: where to show progress (default: stderr).
      stop: a `Stop` that the caller watches; None: handle signals here.
      after_step: called with the number of steps done, after each is dispatched.

    Raises:
      UserError: the user's mistakes, before anything is written.
      RunFailed: the run cannot continue.
    """
    stream = stream or _stderr()
    say = lambda line: print(f"cem: {line}", file=stream, flush=True)
    own = lambda: watched(Stop(config.checkpoint.grace_seconds, _leave, say))
    with own() if stop is None else nullcontext(stop) as stop:
        config = with_absolute_paths(config)
        return _train(config, place(workdir), init_from, stream, say, stop, after_step)


def _train(config: Config, workdir: AnyPath, init_from, stream, say, stop, after_step):
    if config.log.profile_steps and is_url(workdir):
        raise UserError("log.profile_steps: profiles go to local directories; --workdir is a URL")
    setup = prepare_run(config)
    present = present_config(workdir) or config
    fingerprint = setup.mixture.fingerprint
    latest = lambda: Reader(workdir / "checkpoints", report=lambda line: None).latest_step()
    # Before the directory is made, so that none remains if processes disagree or one fails.
    session.current().agree(lambda: agreed_facts(config, fingerprint, latest(), init_from))
    with only_writer(workdir), Writer(workdir / "checkpoints", **_kept(config)) as checkpoints:
        state, position, origin = _start(setup, checkpoints, present, init_from, say)
        course = Course.of(position, config)
        resumed = setup.loader.resumed(course.start, course.window)
        setup = setup._replace(loader=resumed)
        session.current().progress(f"step {course.start}, before the first one here")
        tokenizer_model = setup.mixture.load_tokenizer().model_bytes
        if course.start >= course.total:
            require_steps_left(workdir, position, present, config)
            if not position.owes_validation:
                if session.current().is_first and present != config:  # the data have moved
                    write_run_files(workdir, config, tokenizer_model)
                print(
                    f"finished: {workdir} is at step {course.start} of {course.total}", file=stream
                )
                return _result(position, checkpoints)
        # Before config.json, whose checkpoint.every tells which saves the old metrics imply.
        with _metrics(workdir, config, position) as metrics:
            # before config.json too: without it, no run has begun
            if origin is not None:
                metrics.write("event", position.step, event="initialised", **origin)
            if session.current().is_first:
                write_run_files(workdir, config, tokenizer_model)
            session.current().await_file(workdir / "config.json")
            loop = Loop(setup, workdir, checkpoints, metrics, course, stop, stream)
            loop.announce()
            if course.start:
                for line in report_changes(position, present, config):
                    say(line)
                for name, (old, new) in changes(present, config).items():
                    values = dict(field=name, before=old, after=new)
                    metrics.write("event", course.start, event="changed", **values)
            now = replace(
                position,
                config=config.to_dict(),
                dataset=fingerprint,
                tokenizer_hash=setup.mixture.tokenizer_hash,
                separator=setup.mixture.separator,
                tokenizer=base64.b64encode(tokenizer_model).decode(),
            )
            end = loop.run(state, now, after_step or (lambda done: None))
        checkpoints.wait()
        return _result(end, checkpoints)


def _start(
    setup: Setup, checkpoints: Writer, present: Config, init_from: str | None, say
) -> tuple[TrainState, Position, dict[str, Any] | None]:
    """Return (state, position, record of --init-from): the newest checkpoint's, or step 0's."""
    workdir = checkpoints.directory.parent
    if checkpoints.latest_step() is None:
        require_same_run(workdir, present, setup.config)
        session.current().shared(
            "what is lost", lambda: _require_new(checkpoints, present, init_from)
        )
        if init_from is None:
            start = Position(0, tokens=0, initialised_from=None)
            return fresh_state(setup.config, setup.state), start, None
        state, record = initialised_from(setup, init_from, say)
        return state, Position(0, tokens=0, initialised_from=str(place(init_from))), record

    def continued(info: Info) -> TrainState:
        """Return the state to read; refuse a checkpoint that this run cannot resume from."""
        position = info.position
        if position.imported:
            raise _no_optimizer_state(workdir)
        require_same_run(workdir, as_recorded(present, position), setup.config)
        if position.dataset != setup.mixture.fingerprint:
            raise _other_dataset(position.dataset, setup.mixture.fingerprint)
        return setup.state

    state, info = checkpoints.restore(None, continued)
    if init_from is not None:
        require_origin(workdir, info.position, init_from, say)
    if edited := edited_config(workdir, present, info.position):
        say(f"warning: {edited}")
    return state, info.position, None


def _require_new(checkpoints: Writer, present: Config, init_from: str | None) -> None:
    """Raise UserError if a run without a checkpoint must not be restarted like this."""
    workdir = checkpoints.directory.parent
    require_nothing_lost(workdir, checkpoints.once_complete, present)
    require_same_start(workdir, init_from)


def _no_optimizer_state(workdir: AnyPath) -> UserError:
    return UserError(
        f"{workdir}: was made by `cem import` and holds parameters, but no optimizer state that "
        f"training could resume with; begin another run with `--init-from {workdir}`"
    )


def _other_dataset(found: str | None, now: str) -> UserError:
    return UserError(
        f"data.path: the run was trained on dataset {found}, this is {now}; resume with the "
        "dataset it began with, or start another --workdir"
    )


def _kept(config: Config) -> dict[str, Any]:
    c = config.checkpoint
    return dict(keep=c.keep, keep_best=c.keep_best, keep_every=c.keep_every)


def _result(position: Position, checkpoints: Writer) -> dict[str, Any]:
    checkpoint = checkpoints.directory / str(checkpoints.latest_step())
    return {"step": position.step, "loss": position.loss, "checkpoint": str(checkpoint)}


def _stderr():
    """Return standard error, or a null stream in processes that do not report."""
    return sys.stderr if session.current().is_first else _Nowhere()


class _Nowhere(io.TextIOBase):
    """Discards what is written."""

    def write(self, text: str) -> int:
        return len(text)


def _metrics(workdir: AnyPath, config: Config, position: Position):
    if not session.current().is_first:
        return SilentMetrics()
    due = ("eval",) if position.owes_validation else ()
    board = config.log.tensorboard
    return MetricsWriter(workdir, tensorboard=board, resume_step=position.step, due=due)


def _leave(code: int, line: str) -> NoReturn:
    """Leave whatever session this process is in by then."""
    session.current().leave(code, line)

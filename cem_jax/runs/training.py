"""Training: from the first batch, or the newest checkpoint, to the last one.

What is checked, restored and written around the loop (`stepping`). With several processes all run
this in step; the first one alone writes and reports.
"""

import io
import os
import sys
from contextlib import nullcontext
from typing import Any

from etils import epath

from cem_jax.config import Config
from cem_jax.distributed import session
from cem_jax.distributed.cluster import Cluster
from cem_jax.errors import UserError
from cem_jax.runs.checkpoint import Checkpointer
from cem_jax.runs.directory import (
    agreed_facts,
    only_writer,
    require_nothing_lost,
    with_absolute_paths,
    write_run_files,
)
from cem_jax.runs.init_from import ORIGIN, initialised_from, require_origin, require_same_start
from cem_jax.runs.loop import Loop
from cem_jax.runs.metrics import MetricsWriter, SilentMetrics
from cem_jax.runs.resume import (
    changes,
    check_same_run,
    length,
    require_steps_left,
    rule,
    windows_consumed,
)
from cem_jax.runs.signals import Stop, watched
from cem_jax.storage.paths import place
from cem_jax.storage.remote import is_url
from cem_jax.train.setup import Setup, fresh_state, prepare_run
from cem_jax.train.step import TrainState


def train_in_processes(
    config: Config,
    workdir: str | os.PathLike[str],
    cluster: Cluster | None,
    *,
    init_from: str | None = None,
) -> dict[str, Any] | None:
    """Call `train` in each of the `cluster`'s processes; returns None in all but the first."""
    say = lambda line: print(f"cem: {line}", file=_stderr(), flush=True)
    # Heard while the processes meet, too: as process 1 of a container, nothing else would end it.
    with (
        watched(Stop(config.checkpoint.grace_seconds, session.leave, say)) as stop,
        session.joined(cluster, config.train.stall_minutes),
    ):
        result = train(config, workdir, init_from=init_from, stop=stop)
        return result if session.is_first() else None


def train(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    init_from: str | None = None,
    stream=None,
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Trains to the end and returns {step, loss, checkpoint}.

    Continues a run that `workdir` holds; else begins with fresh parameters, or with those of the
    run in `init_from`. Raises UserError, before anything is written, for what the user got wrong;
    RunFailed when the run cannot go on. `stop`: watched by the caller; None: signals are watched
    here.
    """
    stream = stream or _stderr()
    say = lambda line: print(f"cem: {line}", file=stream, flush=True)
    own = lambda: watched(Stop(config.checkpoint.grace_seconds, session.leave, say))
    with own() if stop is None else nullcontext(stop) as stop:
        return _train(with_absolute_paths(config), place(workdir), init_from, stream, say, stop)


def _train(config: Config, workdir: epath.Path, init_from, stream, say, stop) -> dict[str, Any]:
    if config.log.profile_steps and is_url(workdir):
        raise UserError("log.profile_steps: profiles go to local directories; --workdir is a URL")
    setup = prepare_run(config)
    before = check_same_run(workdir, config)
    fingerprint = setup.mixture.fingerprint
    session.agree(lambda: agreed_facts(config, fingerprint, _newest(workdir), init_from))
    with only_writer(workdir), Checkpointer(workdir / "checkpoints", **_kept(config)) as saved:
        state, extra, origin = _start(setup, saved, before, init_from, say)
        start, (total, _) = int(state.step), length(config, extra)
        owes_validation = extra.get("owes_validation", False)
        consumed = windows_consumed(extra, config) if start else 0
        setup = setup._replace(loader=setup.loader.resumed(start, consumed))
        session.progress(f"step {start}, before the first one here")
        if start >= total:
            require_steps_left(workdir, extra, before, config)
        if start >= total and not owes_validation:
            if session.is_first() and before != config:  # the data has moved
                write_run_files(workdir, config, setup.mixture.load_tokenizer().model_bytes)
            print(f"finished: {workdir} is at step {start} of {total}", file=stream)
            return _result(start, extra.get("loss"), saved)
        # Before config.json: what the old lines prove was saved, its checkpoint.every tells.
        due = ("eval",) if owes_validation else ()
        with _metrics(workdir, config, start, due) as metrics:
            # before config.json too: a run without it has not begun
            if origin is not None:
                metrics.write("event", start, event="initialised", **origin)
            if session.is_first():
                write_run_files(workdir, config, setup.mixture.load_tokenizer().model_bytes)
            session.await_file(workdir / "config.json")
            loop = Loop(setup, workdir, saved, metrics, stream, stop, extra)
            loop.announce(start)
            _record(extra, consumed, before, config, metrics, say)
            loss = loop.run(state, start, owes_validation)
        saved.wait()
        return _result(total, loss, saved)


def _record(extra, consumed: int, before, config: Config, metrics, say) -> None:
    """Tells and writes down what is not as before."""
    start = extra.get("step", 0)
    if not start:
        return
    for line in rule(extra, consumed, before, config):
        say(line)
    for name, (old, new) in changes(before, config).items():
        metrics.write("event", start, event="changed", field=name, before=old, after=new)


def _kept(config: Config) -> dict[str, Any]:
    c = config.checkpoint
    return dict(keep=c.keep, keep_best=c.keep_best, keep_every=c.keep_every)


def _newest(workdir: epath.Path) -> int | None:
    quiet = dict(keep=1, keep_best=False, report=lambda line: None)
    with Checkpointer(workdir / "checkpoints", **quiet) as found:
        return found.latest_step()


def _stderr():
    """Standard error; nowhere in the processes that report nothing."""
    return sys.stderr if session.is_first() else _Nowhere()


class _Nowhere(io.TextIOBase):
    """Takes the progress lines of the processes that report none."""

    def write(self, text: str) -> int:
        return len(text)


def _metrics(workdir: epath.Path, config: Config, start: int, due) -> MetricsWriter | SilentMetrics:
    if not session.is_first():
        return SilentMetrics()
    board = config.log.tensorboard
    return MetricsWriter(workdir, tensorboard=board, resume_step=start, due=due)


def _start(
    setup: Setup, checkpointer: Checkpointer, before: Config, init_from: str | None, say
) -> tuple[TrainState, dict[str, Any], dict[str, Any] | None]:
    """(state, extra, origin): the newest sound checkpoint, or step 0."""
    workdir = checkpointer.directory.parent
    if checkpointer.latest_step() is None:
        session.shared("what is lost", lambda: _require_new(checkpointer, before, init_from))
        if init_from is None:
            return fresh_state(setup), {ORIGIN: None}, None
        state, origin = initialised_from(setup, init_from, say)
        return state, {ORIGIN: str(place(init_from))}, origin
    extra = checkpointer.read_extra()
    if extra.get("imported"):
        raise _no_optimizer_state(workdir)
    if init_from is not None:
        require_origin(workdir, extra, init_from, say)
    state, extra, _ = checkpointer.restore(None, setup.state)
    found, now = extra["dataset"], setup.mixture.fingerprint
    if found != now:
        raise _other_dataset(found, now)
    return state, extra, None


def _require_new(checkpointer: Checkpointer, before: Config, init_from: str | None) -> None:
    """Raises UserError where a run without a checkpoint is not to be begun again like this."""
    workdir = checkpointer.directory.parent
    require_nothing_lost(workdir, checkpointer.once_complete(), before)
    require_same_start(workdir, init_from)


def _no_optimizer_state(workdir: epath.Path) -> UserError:
    return UserError(
        f"{workdir}: was made by `cem import` and holds parameters, but no optimizer state that "
        f"training could go on with; begin another run with `--init-from {workdir}`"
    )


def _other_dataset(found: str, now: str) -> UserError:
    return UserError(
        f"data.path: the run was trained on dataset {found}, this is {now}; resume with the "
        "dataset it began with, or start another --workdir"
    )


def _result(step: int, loss: float | None, checkpointer: Checkpointer) -> dict[str, Any]:
    checkpoint = checkpointer.directory / str(checkpointer.latest_step())
    return {"step": step, "loss": loss, "checkpoint": str(checkpoint)}

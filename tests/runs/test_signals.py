"""SIGTERM and SIGINT in every phase of a run; resuming gives the undisturbed result."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tiny import BASE, FIELDS, tiny_config
from undisturbed import assert_same_run

from cem_jax.runs import checkpoints, loop, training
from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.metrics import read_metrics
from cem_jax.runs.signals import SIGNALS, Stop, watched

TERM, INT = signal.SIGTERM, signal.SIGINT
SHORT = dict(train__steps=6, model__layers=1, eval__every=3, checkpoint__every=2)


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    training.train(tiny_config(data__path=str(dataset), **SHORT), workdir)
    return workdir


def busy_without_python(seconds: float) -> None:
    """Block the main thread where Python runs no signal handler, as compilation does."""
    end = time.monotonic() + seconds
    rounds = 200_000
    while time.monotonic() < end:
        began = time.monotonic()
        hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
        rounds = int(rounds * (end - time.monotonic()) / max(time.monotonic() - began, 1e-3)) + 1


def stopped(grace):
    ends, lines = [], []
    return (
        Stop(grace, lambda *how: ends.append((*how, time.monotonic())), lines.append),
        ends,
        lines,
    )


def test_a_signal_and_its_deadline_work_while_python_is_blocked():
    stop, ends, lines = stopped(0.2)
    stop.something_to_save()
    began = time.monotonic()
    with watched(stop):
        os.kill(os.getpid(), TERM)
        busy_without_python(1.0)
    ((status, line, at),) = ends
    assert status == 143 and at - began < 0.8
    assert "did not stop within 0 s of SIGTERM (checkpoint.grace_seconds)" in line
    assert lines == ["SIGTERM: saving, for at most 0 s"]


def test_a_second_signal_changes_nothing():
    stop, ends, lines = stopped(60)
    stop.something_to_save()
    with watched(stop):
        for number in (INT, TERM, TERM, INT):
            os.kill(os.getpid(), number)
            time.sleep(0.05)
    assert stop.signal == INT and stop.status == 130
    assert len(lines) == 1 and not ends


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_signals_of_schedulers_save_and_end(name, dataset, tmp_path):
    number = signal.Signals[name]
    config = tiny_config(data__path=str(dataset), **SHORT)
    announce = lambda done: os.kill(os.getpid(), number) if done == 3 else None
    with pytest.raises(SystemExit) as ended:
        training.train(config, tmp_path / "run", after_step=announce)
    assert ended.value.code == 128 + number
    with Writer(tmp_path / "run" / "checkpoints", keep=9, keep_best=True) as found:
        assert found.latest_step() >= 3


def test_a_hangup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop, ends, lines = stopped(1)
        with watched(stop):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.1)
        assert stop.signal is None and not ends and not lines
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handlers_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    with watched(stopped(1)[0]):
        assert signal.getsignal(TERM) != before[1]
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def send(times: int = 2) -> None:
    for _ in range(times):
        os.kill(os.getpid(), TERM)
        time.sleep(0.02)


def while_validating(patch, at):
    unpatched = loop.Loop._validate

    def validate(self, state, done):
        if done == at:
            send()
        return unpatched(self, state, done)

    patch.setattr(loop.Loop, "_validate", validate)


def in_a_step(patch, at):
    unpatched, count = loop.place_batch, iter(range(1, 100))

    def place(batch, mesh):
        if next(count) == at:
            send()
        return unpatched(batch, mesh)

    patch.setattr(loop, "place_batch", place)


def while_saving(patch, at):
    """Signal in Orbax's thread, while the main thread continues or waits for the last save."""
    unpatched = checkpoints.write_checksums

    def write(directory):
        if directory.name.split(".")[0] == str(at):
            send()
            time.sleep(0.3)
        unpatched(directory)

    patch.setattr(checkpoints, "write_checksums", write)


@pytest.mark.parametrize(
    ("phase", "at", "status"),
    [
        pytest.param(in_a_step, 2, 143, marks=pytest.mark.slow),
        (in_a_step, 6, 143),  # the final validation is repeated
        (while_validating, 3, 143),
        pytest.param(while_validating, 6, 143, marks=pytest.mark.slow),
        (while_saving, 2, 143),
        (while_saving, 6, 0),  # nothing is left to do
    ],
)
def test_a_signal_saves_and_ends(phase, at, status, dataset, whole, tmp_path):
    config = tiny_config(data__path=str(dataset), **SHORT)
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        phase(patch, at)
        if status:
            with pytest.raises(SystemExit) as ended:
                training.train(config, run)
            assert ended.value.code == status
            with Writer(run / "checkpoints", keep=9, keep_best=True) as found:
                # a save may take as long as the steps until the next one, which waits for it
                late = 1 + (SHORT["checkpoint__every"] if phase is while_saving else 0)
                assert at <= found.latest_step() <= at + late
        else:
            assert training.train(config, run)["step"] == 6
    assert training.train(config, run)["step"] == 6
    assert_same_run(run, whole, config)
    assert read_metrics(run)[-1]["kind"] == "eval"


def test_a_signal_saves_even_if_nobody_reads_stderr(dataset, tmp_path):
    fields = FIELDS | {
        "data.path": str(dataset),
        "train.steps": 100_000,
        "checkpoint.every": 50_000,
    }
    fields |= {"eval.every": 50_000}
    command = [sys.executable, "-m", "cem_jax", "train", "--config", BASE, "--workdir"]
    command += [str(tmp_path / "run"), *(f"--config.{k}={v}" for k, v in fields.items())]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while "step " not in process.stderr.readline():
            assert process.poll() is None
        process.stderr.close()
        before = len(read_metrics(tmp_path / "run"))
        while len(read_metrics(tmp_path / "run")) < before + 50:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(INT)
        assert process.wait(60) == 130
    with Writer(tmp_path / "run" / "checkpoints", keep=9, keep_best=True) as found:
        assert found.latest_step() == read_metrics(tmp_path / "run")[-1]["step"] >= 50


def test_an_owed_validation_is_recorded_once_however_often_it_is_repeated(dataset, whole, tmp_path):
    config = tiny_config(data__path=str(dataset), **SHORT)
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        while_validating(patch, 3)
        with pytest.raises(SystemExit):
            training.train(config, run)
    for _ in range(2):  # interrupted between the validation and the save that records it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.Loop, "_save", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                training.train(config, run)
    training.train(config, run)
    assert_same_run(run, whole, config)


def test_a_signal_during_the_rendezvous_ends_a_process_soon(dataset, tmp_path):
    command = [sys.executable, "-m", "cem_jax", "train", "--config", BASE, "--workdir"]
    fields = FIELDS | {"data.path": str(dataset)}
    command += [str(tmp_path / "run"), *(f"--config.{k}={v}" for k, v in fields.items())]
    with socket.create_server(("localhost", 0)) as port:  # nobody answers there
        address = f"localhost:{port.getsockname()[1]}"
        command += ["--coordinator", address, "--processes", "2", "--process", "1"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        with port.accept()[0]:
            process.send_signal(TERM)
            began = time.monotonic()
            told = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and time.monotonic() - began < 6
    assert "SIGTERM before the first step" in told and "Traceback" not in told


COMPILING = """
    import os, signal, sys, threading, time
    sys.path.insert(0, sys.argv[1])
    from tiny import tiny_config
    from cem_jax.runs import training
    from cem_jax.runs import loop

    config = tiny_config(data__path=sys.argv[2], log__compile_cache=sys.argv[4], **{fields})
    unpatched = loop.jitted_step

    def jitted(*args):
        # from the first call, which compiles for seconds since nothing is cached
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        print(time.time(), flush=True)
        return unpatched(*args)

    loop.jitted_step = jitted
    training.train(config, sys.argv[3])
"""


def test_a_signal_while_compiling_ends_the_run_soon(dataset, tmp_path):
    fields = SHORT | dict(model__layers=3, model__scan_layers=False)  # seconds to compile
    script = textwrap.dedent(COMPILING).replace("{fields}", repr(fields))
    command = [sys.executable, "-c", script, str(Path(__file__).parents[1]), str(dataset)]
    command += [str(tmp_path / "run"), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True)
    took = time.time() - float(done.stdout)
    assert done.returncode == 143, done.stderr
    assert "SIGTERM before the first step" in done.stderr and "Traceback" not in done.stderr
    assert took < 6  # a second's grace, and what a busy machine adds
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
    config = tiny_config(data__path=str(dataset), **(fields | dict(train__steps=1)))
    (tmp_path / "run" / "config.json").unlink()
    assert training.train(config, tmp_path / "run")["step"] == 1

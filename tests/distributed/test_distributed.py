"""Multi-process runs: a quick one, and each kind of failure."""

import json
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny
from process_group import (
    KILL,
    PATIENCE,
    ROOT,
    STOP,
    TERM,
    Group,
    environment,
    flags,
    free_port,
    losses,
    trained,
)

from cem_jax.runs import training
from cem_jax.runs.integrity import find_damage
from cem_jax.runs.metrics import read_metrics
from cem_jax.runs.run import Run

UNLISTED = {"checksums.sha256", "_CHECKPOINT_METADATA", "commit_success.txt"}
LONG = dict(train__steps=120, checkpoint__every=10, checkpoint__keep=50, eval__every=1000)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return tiny.tiny_dataset(tmp_path_factory.mktemp("data"))


def one_process(workdir, dataset, **changes):
    training.train(tiny.tiny_config(data__path=str(dataset), **changes), workdir)
    return workdir


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """The short run with one process."""
    return one_process(tmp_path_factory.mktemp("one") / "run", dataset)


@pytest.fixture(scope="module")
def long(dataset, tmp_path_factory):
    return one_process(tmp_path_factory.mktemp("long") / "run", dataset, **LONG)


def same_losses(ours, theirs):
    for kind in ("train", "eval"):
        want = losses(theirs, kind)
        have = losses(ours, kind)
        assert set(have) == set(want)
        assert have == pytest.approx(want, rel=1e-5)


def test_two_local_processes_train_as_one_does(dataset, tmp_path):
    """Start them by launch/local.sh, as a user would."""
    short = dict(train__steps=3, model__layers=1, eval__every=100, checkpoint__every=100)
    script = [str(ROOT / "launch" / "local.sh"), "2", "--json"]
    port = str(free_port())
    cem = tmp_path / "cem"
    cem.write_text(f'#!/bin/sh\nexec {sys.executable} -m cem_jax "$@"\n')
    cem.chmod(0o755)
    done = subprocess.run(
        [*script, *flags(tmp_path / "two", dataset, **short)],
        env=environment(CEM=str(cem), CEM_PORT=port), capture_output=True, text=True,
        timeout=PATIENCE, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1 and json.loads(lines[0])["step"] == 3  # only one process reports
    assert done.stderr.count("step 3: validation loss") == 1 and "in 2 processes" in done.stderr
    same_losses(tmp_path / "two", one_process(tmp_path / "one", dataset, **short))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        (2, {}),
        (4, {"mesh__fsdp": 2}),
        (2, {"mesh__data": 1, "mesh__tensor": 2}),  # both processes hold all rows
        (4, {"mesh__data": 2, "mesh__tensor": 2}),
        (2, {"mesh__data": 1, "mesh__fsdp": 2, "train__microbatch": 2}),
    ],
)
def test_losses_match_those_of_one_process(count, mesh, dataset, whole, tmp_path):
    workdir = tmp_path / "run"
    group = trained(tmp_path, count, flags(workdir, dataset, **mesh))
    same_losses(workdir, whole)
    assert all("step" not in group.output(index) for index in range(1, count))
    assert sorted(p.name for p in workdir.iterdir()) == sorted(p.name for p in whole.iterdir())
    checkpoints = sorted((workdir / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["6", "8"]
    for path in checkpoints:
        assert find_damage(path) is None
        listed = (path / "checksums.sha256").read_text().splitlines()
        written = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
        written -= {name for name in written if name.rpartition("/")[2] in UNLISTED}
        assert {line.partition("  ")[2] for line in listed} == written
        assert any("process_1" in name for name in written)  # each writes its own part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "killed", "after"), [(2, [1], 4), (2, [0], 1), (4, [0, 1, 2, 3], 2), (2, [0, 1], 2)]
)
def test_killed_and_resumed_with_another_number_of_processes(
    before, killed, after, dataset, long, tmp_path
):
    workdir = tmp_path / "run"
    arguments = flags(workdir, dataset, **LONG)
    with Group(tmp_path / "first", before, arguments) as group:
        group.await_checkpoint(workdir)
        started = time.monotonic()
        group.send(KILL, *killed)
        statuses = group.wait()
        assert 0 not in statuses and time.monotonic() - started < 60
    reached = max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdecimal())
    assert 10 <= reached < 120
    group = trained(tmp_path / "second", after, arguments)
    assert "resuming at step" in group.output(0)
    same_losses(workdir, long)


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_process_stops_all_at_the_same_step(signalled, dataset, long, tmp_path):
    workdir = tmp_path / "run"
    arguments = flags(workdir, dataset, **LONG)
    with Group(tmp_path / "first", 2, arguments) as group:
        group.await_steps(workdir, 11)
        group.send(TERM, signalled)
        assert group.wait() == [128 + TERM] * 2, group.output(0) + group.output(1)
        last = max(losses(workdir))
        assert f"stopped at step {last} of 120" in group.output(0)
        assert (workdir / "checkpoints" / str(last) / "checksums.sha256").exists()
    trained(tmp_path / "second", 2, arguments)
    same_losses(workdir, long)


@pytest.mark.slow
def test_all_skip_a_step_that_is_not_finite_in_one_process_and_stop_together(dataset, tmp_path):
    workdir = tmp_path / "run"
    program = (str(ROOT / "tests" / "distributed" / "poisoned.py"), "4,7,8,9,10,11,12")
    fields = LONG | dict(checkpoint__every=2, train__max_bad_steps=3)
    with Group(tmp_path, 2, flags(workdir, dataset, **fields), program=program) as group:
        assert group.wait() == [1, 1], group.output(0)
        for index in (0, 1):
            assert "step 10: 3 non-finite steps in a row" in group.output(index)
    events = [line for line in read_metrics(workdir) if line["kind"] == "event"]
    assert [(e["step"], e["in_a_row"]) for e in events] == [(5, 1), (8, 1), (9, 2), (10, 3)]
    run = Run.open(workdir)
    parameters, step = run.parameters, run.step
    assert step in (6, 8, 10)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(parameters))


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stuck_process_is_named_and_ends_the_others(stopped, dataset, tmp_path):
    workdir = tmp_path / "run"
    many = LONG | {"train__steps": 100_000, "train__stall_minutes": 0.75}  # compiling takes less
    with Group(tmp_path, 2, flags(workdir, dataset, **many)) as group:
        group.await_steps(workdir, 5)
        group.send(STOP, stopped)
        other = 1 - stopped
        assert group.processes[other].wait(PATIENCE) not in (0, None)
        told = group.output(other)
    assert "no progress for" in told and "since step" in told
    assert "most recent call first" in told  # the stacks
    if stopped == 0:
        assert "process 0, the coordinator, does not answer" in told
    else:
        assert "process 1 (" in told and "is not responding; last seen at step" in told


@pytest.mark.slow
def test_a_failure_of_one_ends_all_with_its_status_and_reason(dataset, tmp_path):
    """Only one process sees a damaged shard, in its own copy of the data."""
    other = tmp_path / "copy" / "dataset"
    subprocess.run(["cp", "-r", str(dataset.parent), str(tmp_path / "copy")], check=True)
    shard = other / "train" / "tokens-00000.npy"
    shard.write_bytes(shard.read_bytes()[:-100])
    given = {1: flags(tmp_path / "run", other)}
    with Group(tmp_path, 2, flags(tmp_path / "run", dataset), given) as group:
        assert group.wait() == [2, 2]
        assert "tokens-00000.npy is damaged or cut short" in group.output(1)
        assert "process 1 (" in group.output(0) and "cut short" in group.output(0)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer__b1": 0.5}, "config optimizer.b1 differs between processes: 0.9 on process 0"),
        ({"train__global_batch": 8}, "config train.global_batch differs between processes: 4 on"),
    ],
)
def test_processes_that_disagree_are_refused(changes, told, dataset, tmp_path):
    given = {1: flags(tmp_path / "run", dataset, **changes)}
    with Group(tmp_path, 2, flags(tmp_path / "run", dataset), given) as group:
        assert group.wait() == [2, 2]
        assert all(told in group.output(index) for index in (0, 1)), group.output(0)
        assert "on process 1 (" in group.output(0)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_dataset_in_one_process_is_refused(dataset, tmp_path):
    other = tiny.tiny_dataset(tmp_path / "other", seed=5)
    given = {1: flags(tmp_path / "run", other)}
    with Group(tmp_path, 2, flags(tmp_path / "run", dataset), given) as group:
        assert group.wait() == [2, 2]
        assert "dataset differs between processes" in group.output(0)


@pytest.mark.slow
def test_a_run_directory_that_is_not_shared_is_refused(dataset, tmp_path):
    quick = {"train__stall_minutes": 0.4}
    given = {1: flags(tmp_path / "elsewhere", dataset, **quick)}
    with Group(tmp_path, 2, flags(tmp_path / "run", dataset, **quick), given) as group:
        assert 0 not in group.wait()
        assert "must be a directory that all processes share" in group.output(1)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_a_process_that_never_joins_is_named(dataset, tmp_path):
    arguments = flags(tmp_path / "run", dataset, train__stall_minutes=0.2)
    with Group(tmp_path, 3, arguments, {1: None}) as group:
        assert group.wait() == [1, None, 1]
        for index in (0, 2):
            assert "process 1 of 3 did not join within 12 s" in group.output(index)
    with Group(tmp_path, 2, arguments, {0: None}) as group:
        assert group.wait() == [None, 1]
        assert "process 0 did not let process 1 (" in group.output(1)
    assert not (tmp_path / "run").exists()

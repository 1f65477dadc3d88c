"""The soak test's checks detect faults."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import tiny_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import soak
import soak_checks
from checkpoint_states import make_state
from soak_runs import FIELDS

from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.position import Position

ROWS = {str(row): 100 + row for row in range(FIELDS["train.global_batch"])}


def log(workdir, name, *lines):
    folder = workdir.with_name(f"{workdir.name}-logs")
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"step": step, "rows": rows}) + "\n" for step, rows in lines)
    (folder / name).write_text(text + '{"step": 9, "ro')  # cut by a kill


@pytest.fixture
def reference(tmp_path):
    log(tmp_path / "whole", "000-0.jsonl", *((step, ROWS) for step in range(4)))
    return tmp_path / "whole"


def test_rows_of_several_processes_and_repeated_steps_are_as_undisturbed(reference, tmp_path):
    half = lambda parity: {row: d for row, d in ROWS.items() if int(row) % 2 == parity}
    log(tmp_path / "run", "000-0.jsonl", (0, half(0)), (1, half(0)))
    log(tmp_path / "run", "000-1.jsonl", (0, half(1)))  # killed a step before the other
    log(tmp_path / "run", "001-0.jsonl", *((step, ROWS) for step in (1, 2, 3)))
    assert soak_checks.consumed_as_undisturbed(tmp_path / "run", reference) == []


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([(0, ROWS), (1, ROWS | {"3": 7})], "step 1, rows ['3']: other windows"),
        ([(0, ROWS), (2, ROWS)], "step 1 was not consumed whole"),
        ([(0, ROWS), (1, {"0": 100})], "step 1 was not consumed whole"),
    ],
)
def test_other_rows_and_gaps_are_found(lines, told, reference, tmp_path):
    log(tmp_path / "run", "000-0.jsonl", *lines)
    (line,) = soak_checks.consumed_as_undisturbed(tmp_path / "run", reference)
    assert told in line


def record(workdir, steps, evals):
    lines = [{"step": step, "kind": "train"} for step in steps]
    lines += [{"step": step, "kind": "eval"} for step in evals]
    workdir.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in sorted(lines, key=lambda x: x["step"]))
    (workdir / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("steps", "evals", "count"),
    [
        (range(1, 101), (50, 100), 0),
        ([*range(1, 101), 40], (50, 100), 1),  # one repeated
        (range(2, 101), (50, 100), 1),
        (range(1, 101), (50,), 2),  # no final evaluation: missing, and not last
    ],
)
def test_the_record_is_checked(steps, evals, count, tmp_path):
    record(tmp_path / "run", steps, evals)
    assert len(soak_checks.metrics_are_whole(tmp_path / "run", 100)) == count


def test_one_flipped_bit_of_a_state_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(soak_checks, "abstract_state", lambda *_: make_state(1))
    for name, state in (("a", make_state(1)), ("b", make_state(1)), ("c", make_state(1))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tiny_config().to_dict()))
        if name == "c":
            head = np.array(state.params["head"])
            head.view(np.uint16)[3] ^= 1
            state.params["head"] = head
        with Writer(tmp_path / name / "checkpoints", keep=1, keep_best=False) as found:
            found.save(state, Position(1))
    same = lambda one, other, step=1: soak_checks.same_state(
        tmp_path / one, tmp_path / other, step, "a mesh"
    )
    assert same("a", "b") == []
    assert "head" in same("a", "c")[0]
    assert same("a", "b", 2) == ["a mesh: a has no checkpoint 2"]


@pytest.mark.parametrize(
    ("sent", "statuses", "steps", "seconds", "fine"),
    [
        (soak.KILL, [-9, 1], 5, 1, True),
        (soak.TERM, [143, 143], 5, 1, True),
        (soak.TERM, [143, 1], 5, 1, False),
        (soak.TERM, [-15, 1], 0, 1, True),  # before its handlers were installed
        (soak.TERM, [143], 5, 100, False),
        (soak.TERM, [None], 5, 1, False),
        (None, [1], 5, 1, False),
    ],
)
def test_exits_are_judged(sent, statuses, steps, seconds, fine):
    attempt = SimpleNamespace(
        steps=lambda: steps, seconds_to_end=lambda: seconds, output=lambda: "what it said"
    )
    problem = soak.judge(sent, statuses, attempt, soak.Tally())
    assert (problem is None) == fine

import json
import math
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.errors import RunFailed, UserError
from cem_jax.runs.metrics import MetricsWriter, read_metrics


def write(folder, resume_step, *steps, tensorboard=False):
    with MetricsWriter(folder, tensorboard=tensorboard, resume_step=resume_step) as writer:
        for step in steps:
            writer.write("train", step, loss=1.0 / step)


def steps(folder):
    return [line["step"] for line in read_metrics(folder)]


def test_lines_are_plain_json(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False, resume_step=0) as writer:
        writer.write(
            "train",
            np.int64(3),
            loss=jnp.float32(0.5),
            learning_rate=np.float64(0.25),
            skipped_steps=jnp.int32(2),
            bad=math.nan,
            worse=jnp.array(-jnp.inf),
        )
        writer.write(
            "event", 3, event="resumed", flag=True, none=None, list=[1, math.inf, {"a": 2}]
        )
        # Each line is on disk as soon as it is written.
        text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.splitlines()[0] == (
        '{"step": 3, "kind": "train", "loss": 0.5, "learning_rate": 0.25, "skipped_steps": 2, '
        '"bad": null, "worse": null}'
    )
    assert json.loads(text.splitlines()[1]) == {
        "step": 3,
        "kind": "event",
        "event": "resumed",
        "flag": True,
        "none": None,
        "list": [1, None, {"a": 2}],
    }
    assert read_metrics(tmp_path / "run") == [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("value", [object(), b"bytes", {1, 2}])
def test_what_json_cannot_hold_is_refused(tmp_path, value):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=0) as writer:
        with pytest.raises(TypeError, match="numbers or text"):
            writer.write("train", 1, value=value)
        with pytest.raises(ValueError, match="kind"):
            writer.write("other", 1)
    assert read_metrics(tmp_path) == []


def test_each_step_appears_once_after_resumes(tmp_path):
    write(tmp_path, 0, *range(1, 8))
    write(tmp_path, 4, *range(5, 7))
    write(tmp_path, 5, *range(6, 11))
    assert steps(tmp_path) == list(range(1, 11))
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    write(tmp_path, 0, 1, 2)
    assert steps(tmp_path) == [1, 2]


def test_what_is_written_again_appears_once(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True, resume_step=0) as writer:
        writer.write("event", 0, event="initialised", taken=3)
        writer.write("train", 3, loss=2.0)
        writer.write("eval", 3, split="validation", loss=4.0)
    for resumed in range(2):
        with MetricsWriter(tmp_path, tensorboard=True, resume_step=3, due=["eval"]) as writer:
            assert [line["kind"] for line in read_metrics(tmp_path)] == ["event", "train"]
            writer.write("eval", 3, split="validation", loss=5.0 + resumed)
    assert [line["loss"] for line in read_metrics(tmp_path)[1:]] == [2.0, 6.0]
    shown = left_by_tensorboard(tmp_path / "tensorboard")
    assert shown == {
        "event/taken": [(0, 3.0)],
        "train/loss": [(3, 2.0)],
        "eval/validation/loss": [(3, 6.0)],
    }


def test_a_torn_last_line_is_dropped(tmp_path):
    write(tmp_path, 0, 1, 2, 3)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, 3, 4)
    assert steps(file) == [1, 2, 4]


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[1]",
        pytest.param(b"[" * 100_000, id="deep"),
        b'{"step": 1}',
        b'{"kind": "train"}',
        b"",
        b"\0\0\0",
        b"\xff",
        b'{"step": 1, "kind": "train", "loss": NaN}',
    ],
)
def test_bad_lines_are_set_aside_and_named(tmp_path, line, capsys):
    file = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "kind": "train"}\n'
    before = good + line + b"\n" + good
    file.write_bytes(before)
    assert steps(file) == [1, 1]
    assert "metrics.jsonl: line 2 is not a metrics line" in capsys.readouterr().err
    assert file.read_bytes() == before
    write(tmp_path, 1, 2)
    told = capsys.readouterr().err
    assert "line 2 is not a metrics line" in told and "moved to metrics.jsonl.invalid" in told
    assert steps(file) == [1, 1, 2]
    assert (tmp_path / "metrics.jsonl.invalid").read_bytes() == line + b"\n"
    assert "warning" not in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be read"):
        read_metrics(tmp_path / "absent.jsonl")


def test_tensorboard_being_a_file_is_a_warning(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("mine")
    write(tmp_path, 0, 1, tensorboard=True)
    assert "tensorboard: is a file, not a directory" in capsys.readouterr().err
    assert steps(tmp_path) == [1] and (tmp_path / "tensorboard").read_text() == "mine"


def test_a_full_disk_is_reported_with_the_file(tmp_path):
    with (
        pytest.raises(RunFailed, match=r"metrics\.jsonl: cannot be written: No space left"),
        MetricsWriter(tmp_path, tensorboard=False, resume_step=0) as writer,
    ):
        writer._file._file.close()
        writer._file._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 (closed with it)
        writer.write("train", 1, loss=2.0)


def test_missing_permission_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written: "):
        MetricsWriter(tmp_path / "file", tensorboard=False, resume_step=0)


def test_lines_survive_a_kill(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from cem_jax.runs.metrics import MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1], tensorboard=False, resume_step=0)\n"
        "writer.write('train', 1, loss=2.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert steps(tmp_path) == [1]


def events(folder):
    """Return the events below folder in order, read by protobuf alone."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            yield Event.FromString(content[at + 12 : at + 12 + size])
            at += 16 + size


def left_by_tensorboard(folder):
    """Return {tag: [(step, value)]} without what a later start at or before that step discards."""
    found = {}
    for event in events(folder):
        if event.HasField("session_log"):
            kept = {tag: [one for one in of if one[0] < event.step] for tag, of in found.items()}
            found = {tag: of for tag, of in kept.items() if of}
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True, resume_step=0) as writer:
        writer.write("train", 1, loss=2.0, bad=math.nan)
        writer.write("train", 2, loss=1.5, sources={"web": {"epoch": 0.5}})
        writer.write("eval", 2, split="validation", loss=3.0, tokens=7)
        writer.write("event", 2, event="changed", field="train.steps", before=9, after=8)
    found = left_by_tensorboard(tmp_path / "tensorboard")
    assert found["train/loss"] == [(1, 2.0), (2, 1.5)]
    assert found["train/sources/web/epoch"] == [(2, 0.5)]
    assert found["eval/validation/loss"] == [(2, 3.0)]
    assert found["eval/validation/tokens"] == [(2, 7.0)]
    assert found["event/train.steps/after"] == [(2, 8.0)]
    assert "train/bad" not in found
    write(tmp_path, 1, 2, tensorboard=True)
    assert left_by_tensorboard(tmp_path / "tensorboard")["train/loss"] == [(1, 2.0), (2, 0.5)]

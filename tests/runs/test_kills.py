"""`kill -9` at any point of a run: the steps since the last save are lost, and nothing else.

A process trains and kills itself at a named call; then the run is trained to its end here and
compared with one that nothing disturbed.
"""

import io
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny import tiny_config
from undisturbed import assert_same_run

from cem_jax.runs import training

RUN = dict(train__steps=6, model__layers=1, eval__every=2, checkpoint__every=2, checkpoint__keep=1)

# name: (module, function, number of the call, before or after it, the steps it may go on from): a
# save that was begun may be complete or not
POINTS = {
    "before config.json is written": ("runs.directory", "write_durably", 2, "before", (0,)),
    "before the first step": ("runs.loop", "Loop.run", 1, "before", (0,)),
    "in a step": ("runs.loop", "place_batch", 4, "before", (0, 2)),
    "before the second save begins": ("runs.checkpoints", "Writer.save", 2, "before", (0, 2)),
    "when the second save has begun": ("runs.checkpoints", "Writer.save", 2, "after", (2,)),
    "arrays written, no list of sums": ("runs.checkpoints", "write_checksums", 2, "before", (2,)),
    "list written, not renamed": ("runs.checkpoints", "write_checksums", 2, "after", (2,)),
    "complete, the old one not removed": (
        "runs.checkpoints",
        "Writer._retain",
        2,
        "before",
        (4,),
    ),
    "amid the removal of the old one": ("storage.paths", "_clear", 2, "before", (4,)),
    "in a validation": ("runs.loop", "Loop._validate", 2, "before", (0, 2)),
    "validation done, not saved": ("runs.loop", "Loop._validate", 2, "after", (0, 2)),
    "in the final save": ("runs.checkpoints", "write_checksums", 3, "after", (4,)),
    "after the final save": ("runs.checkpoints", "Writer._retain", 3, "after", (6,)),
}
QUICK = ("list written, not renamed", "amid the removal of the old one")

KILLED = """
    import importlib, os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from tiny import tiny_config
    from cem_jax.runs import training

    module, path, count, moment = sys.argv[4], sys.argv[5].split("."), int(sys.argv[6]), sys.argv[7]
    owner = importlib.import_module("cem_jax." + module)
    for name in path[:-1]:
        owner = getattr(owner, name)
    unpatched, calls = getattr(owner, path[-1]), iter(range(1, 1000))

    def call(*args, **kwargs):
        last = next(calls) == count
        if last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = unpatched(*args, **kwargs)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, path[-1], call)
    training.train(tiny_config(data__path=sys.argv[2], **{fields}), sys.argv[3])
"""


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    training.train(tiny_config(data__path=str(dataset), **RUN), workdir)
    return workdir


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=() if p in QUICK else pytest.mark.slow, id=p) for p in POINTS],
)
def test_killed_and_resumed(point, dataset, whole, tmp_path):
    module, function, count, moment, resumed = POINTS[point]
    run = tmp_path / "run"
    script = textwrap.dedent(KILLED).replace("{fields}", repr(RUN))
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", script, tests, str(dataset), str(run), module, function]
    done = subprocess.run([*command, str(count), moment], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    config = tiny_config(data__path=str(dataset), **RUN)
    told = io.StringIO()
    assert training.train(config, run, stream=told)["step"] == 6
    found = re.search(r"resuming at step (\d+)|is at step (\d+)|starting", told.getvalue())
    assert int(found[1] or found[2] or 0) in resumed, told.getvalue()
    assert_same_run(run, whole, config)
    assert [p.name for p in (run / "checkpoints").iterdir() if not p.name.isdecimal()] == []

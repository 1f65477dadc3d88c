"""One run over a chain of device counts and meshes has the same state and losses."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import tiny_config

from cem_jax.runs import training
from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.metrics import read_metrics
from cem_jax.train.setup import abstract_state

RUN = dict(train__steps=12, checkpoint__every=100, checkpoint__keep=20, eval__every=6)
CHAIN = [  # devices, mesh, step at which it is stopped
    (1, {}, 2),
    (8, dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2), 4),
    (2, dict(mesh__data=1, mesh__fsdp=2), 6),
    (4, dict(mesh__data=2, mesh__tensor=2), 8),
    (8, dict(mesh__data=2, mesh__context=4), 10),
    (1, {}, 12),
]

MACHINE = """
    import hashlib, json, sys
    sys.path[:0] = [sys.argv[1], sys.argv[1] + "/runs"]
    import jax, numpy as np
    from stopped import stop_after
    from tiny import tiny_config
    from cem_jax.runs import training
    from cem_jax.runs import loop

    run, end = loop.Loop.run, int(sys.argv[5])

    def told(self, state, position, after_step):
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(state):
            digest.update(np.asarray(leaf).tobytes())
        print(json.dumps([position.step, jax.device_count(), digest.hexdigest()]), flush=True)
        return run(self, state, position, after_step)

    loop.Loop.run = told
    config = tiny_config(data__path=sys.argv[2], **json.loads(sys.argv[4]))
    training.train(config, sys.argv[3], **(stop_after(end) if end < 12 else {}))
"""


def digest_of(workdir, step, config):
    """Return the digest of a checkpoint's state, as one device reads it."""
    mesh = jax.make_mesh((1, 1, 1, 1), ("data", "fsdp", "tensor", "context"))
    with Writer(workdir / "checkpoints", keep=20, keep_best=True) as checkpoints:
        state = checkpoints.restore(step, abstract_state(config, mesh))[0]
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_a_run_moves_from_machine_to_machine(dataset, tmp_path):
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    config = tiny_config(data__path=str(dataset), **RUN)
    training.train(config, whole)
    tests = str(Path(__file__).parents[1])
    before = 0
    for devices, mesh, end in CHAIN:
        command = [sys.executable, "-c", textwrap.dedent(MACHINE), tests, str(dataset)]
        command += [str(workdir), json.dumps(RUN | mesh), str(end)]
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == (143 if end < 12 else 0), done.stderr
        start, count, digest = json.loads(done.stdout.splitlines()[0])
        assert (start, count) == (before, devices)
        if start:
            assert digest == digest_of(workdir, start, config)
        before = end
    for kind in ("train", "eval"):
        ours, theirs = (
            {line["step"]: line["loss"] for line in read_metrics(where) if line["kind"] == kind}
            for where in (workdir, whole)
        )
        assert ours == pytest.approx(theirs, rel=1e-5)

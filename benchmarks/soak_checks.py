"""Checks of a soak: consumed rows, metrics, and states bit for bit."""

import json
from pathlib import Path

import jax
import numpy as np
from soak_runs import FIELDS, logs_of

from cem_jax.config import Config
from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.directory import read_config
from cem_jax.runs.metrics import read_metrics
from cem_jax.train.setup import abstract_state


def consumed_as_undisturbed(workdir: Path, reference: Path) -> list[str]:
    """Return a line per step that consumed other rows than the undisturbed run."""
    expected = {line["step"]: line["rows"] for _, line in _consumed(reference)}
    every = {str(row) for row in range(FIELDS["train.global_batch"])}
    broken, seen = [], {}
    for name, line in _consumed(workdir):
        step, rows = line["step"], line["rows"]
        wrong = [row for row, digest in rows.items() if expected[step][row] != digest]
        if wrong:
            broken.append(f"{workdir.name}, {name}: step {step}, rows {wrong}: other windows")
        seen.setdefault(step, set()).update(rows)
    missed = [step for step, rows in seen.items() if rows != every]
    # Without a gap: the steps up to the last one that ran.
    missed += sorted(set(range(max(seen, default=-1) + 1)) - seen.keys())
    return broken + [f"{workdir.name}: step {step} was not consumed whole" for step in missed]


def _consumed(workdir: Path):
    for path in sorted(logs_of(workdir).glob("*.jsonl")):
        for text in path.read_text().split("\n")[:-1]:  # a kill may cut the last line
            yield path.name, json.loads(text)


def metrics_are_whole(workdir: Path, steps: int) -> list[str]:
    """Return what is wrong with the record of a finished run."""
    lines = read_metrics(workdir)
    broken = []
    for kind, expected in (
        ("train", list(range(1, steps + 1))),
        ("eval", list(range(FIELDS["eval.every"], steps + 1, FIELDS["eval.every"]))),
    ):
        found = [line["step"] for line in lines if line["kind"] == kind]
        if found != expected:
            odd = sorted(set(expected) ^ set(found)) or "order or repetition"
            broken.append(f"{workdir.name}: {kind} lines are not each once: {odd}")
    if (lines[-1]["kind"], lines[-1]["step"]) != ("eval", steps):
        broken.append(f"{workdir.name}: the last line is not the final evaluation")
    return broken


def same_state(ours: Path, theirs: Path, step: int, what: str) -> list[str]:
    """Return a line for the first array of checkpoint `step` that differs in any bit."""
    states = []
    for workdir in (ours, theirs):
        config = read_config(workdir)
        assert isinstance(config, Config)
        with Writer(workdir / "checkpoints", keep=1, keep_best=False) as checkpoints:
            if step not in checkpoints.steps():
                return [f"{what}: {workdir.name} has no checkpoint {step}"]
            mesh = jax.make_mesh((1, 1, 1, 1), ("data", "fsdp", "tensor", "context"))
            states.append(checkpoints.restore(step, abstract_state(config, mesh))[0])
    named = jax.tree_util.tree_leaves_with_path(states[0])
    for (path, one), other in zip(named, jax.tree.leaves(states[1]), strict=True):
        if np.asarray(one).tobytes() != np.asarray(other).tobytes():
            name = jax.tree_util.keystr(path)
            return [f"{what}: {name} of checkpoint {step} is not bit for bit the undisturbed one"]
    return []

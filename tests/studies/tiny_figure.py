"""A user's own figure, small enough to train in a test, with rows as of runs, and a report."""

import dataclasses
import json
from pathlib import Path

import tiny
from etils import epath

from cem_jax.cli import main
from cem_jax.studies.figures.grid import Run, read_sweep, runs_of
from cem_jax.studies.figures.rows import Row

BASE = """
from configs import base

def get_config():
    c = base.get_config()
    c.model.vocab_size = 320
    c.model.dim = 16
    c.model.layers = 1
    c.model.attention.heads = 2
    c.model.attention.kind = "llama"
    c.model.attention.position = "rope"
    c.model.attention.self_bias = False
    c.model.attention.steps = 1
    c.model.mlp.kind = "gated"
    c.model.mlp.dim = 24
    c.model.mlp.steps = 1
    c.data.context = 16
    c.optimizer.learning_rate = 0.01
    c.train.global_batch = 4
    c.train.steps = 3
    c.train.compute_dtype = "float32"
    c.eval.batches = 1
    c.log.tensorboard = False
    c.log.compile_cache = {cache!r}
    return c
"""

FIGURE = """
from pathlib import Path

import tiny_base
from cem_jax.studies.figures.grid import Arm, Sweep

def get_sweep(size="small"):
    llama = tiny_base.get_config()
    cem = llama.copy_and_resolve_references()
    cem.model.attention.update(kind="cem", position="alibi", self_bias=True)
    arms = [Arm("Llama", llama), Arm("CEM", cem)]
    {more}
    return Sweep(
        name={name!r},
        title="A figure of one's own",
        plot={plot!r},
        arms={{size: arms}},
        files={{size: tiny_base.__file__}},
        {fields}
    )
"""


def write_figure(
    folder: Path, name: str = "mine", *, plot: str = "parameters", more: str = "", fields: str = ""
) -> str:
    """Write a figure file with the arms Llama and CEM, and its configuration; return its path."""
    cache = tiny.FIELDS["log.compile_cache"]
    (folder / "tiny_base.py").write_text(BASE.format(cache=cache))
    text = FIGURE.format(name=name, plot=plot, more=more, fields=fields)
    (folder / f"{name}.py").write_text(text)
    return str(folder / f"{name}.py")


def row(run: Run, perplexity: float, **fields) -> Row:
    """Return the row that a run would have left."""
    made = Row(
        run=run.name,
        key=run.key,
        size=run.size,
        learning_rate=run.config.optimizer.learning_rate,
        seed=run.seed,
        parameters=1000,
        training_flops=2e9,
        tokens=192,
        steps=3,
        seconds=1.5,
        split="test",
        loss=2.0,
        perplexity=perplexity,
        bits_per_byte=1.25,
        loss_at_steps={},
        dataset="one",
        device="1 × cpu",
        versions={},
        config=run.config.to_dict(),
    )
    return dataclasses.replace(made, **fields)


def keep(folder, path, perplexity, seeds=(0,), overrides=(), **fields):
    """Write rows of the figure's runs; `perplexity(arm, run)` is None for a missing run."""
    for run in runs_of([read_sweep(path)], seeds, overrides):
        value = perplexity(run.uses[0].arm, run)
        if value is not None:
            file = epath.Path(folder / "rows") / f"{run.name}.json"
            row(run, float(value), **fields).write(file)


def report(folder, capsys, *flags):
    """Return what `cem report --json` prints for the rows in the folder."""
    assert main(["report", "--workdir", str(folder / "rows"), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)

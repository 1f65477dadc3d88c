"""Run `cem train`; process 1 gets ids that make the loss NaN in the steps of argument 1."""

import sys

import jax
import numpy as np

from cem_jax import cli
from cem_jax.runs import loop

poisoned = {int(number) for number in sys.argv[1].split(",")}
unpatched, steps = loop.place_batch, iter(range(10_000))


def place(batch, mesh):
    if next(steps) in poisoned and jax.process_index() == 1:
        batch = {"tokens": np.full_like(batch["tokens"], 99_999)}
    return unpatched(batch, mesh)


loop.place_batch = place
sys.exit(cli.main(sys.argv[2:]))

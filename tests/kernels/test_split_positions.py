"""Attention with positions split over devices, against one device, and its communication."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.kernels import Call, blockwise
from cem_jax.kernels.over_mesh import undivided
from cem_jax.kernels.split_positions import balanced
from cem_jax.sharding.layout import Split

SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from attention_oracle import attend, random_inputs
from cem_jax.sharding.mesh import make_mesh

def results(inputs, segments, how, average):
    floats = {n: x for n, x in inputs.items() if n != "segments"}
    def outputs(t):
        lse, o, a = attend(**t, segments=segments, tau=1.3, average=average, **how)
        return [x for x in (lse, o, a) if x is not None]
    loss = lambda t: sum(jnp.sin(x + 1).sum() for x in outputs(t))
    return jax.jit(lambda t: (outputs(t), jax.grad(loss)(t)))(floats)

for sizes in ({"context": 8}, {"data": 2, "context": 2, "tensor": 2}):
    mesh = make_mesh(sizes)
    for diagonal, average, values in (("shared", "summed", False), ("none", "none", True),
                                      ("per_head", "per_head", False)):
        inputs = random_inputs(np.random.default_rng(0), 48, leading=(2,), diagonal=diagonal,
                               segments=True, values=values)
        segments = inputs.pop("segments")
        alone = results(inputs, segments, dict(implementation="dense"), average)
        for how in (dict(), dict(implementation="blockwise", block_sizes=(2, 3))):
            with jax.set_mesh(mesh):
                split = results(inputs, segments, how, average)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11),
                         split, alone)
            print("agrees", diagonal, average)
"""

COLLECTIVES = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import re
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from cem_jax.config import load_config
from cem_jax.model import CEMAttention
from cem_jax.sharding.mesh import make_mesh

mesh = make_mesh({"context": 4})
for steps in (1, 2, 4):
    config = load_config("configs/base.py", {"train.steps": 1, "model.attention.steps": steps})
    layer = CEMAttention(config.model, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((2, 64, config.model.dim), jnp.float32,
                             sharding=NamedSharding(mesh, P(None, "context")))
    with jax.set_mesh(mesh):
        text = jax.jit(lambda x: layer(x)).lower(x).compile().as_text()
    count = lambda kind: len(re.findall(kind + r"(?:-start)?\\(", text))
    print(steps, count(" all-gather"), count(" collective-permute"), count(" all-reduce"))
"""


def run(script):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=here.parents[1],
        env=dict(os.environ, PYTHONPATH=f"{here.parent}:{here.parents[1]}"),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_outputs_and_gradients_are_those_of_one_device():
    compared = Counter(run(SCRIPT).splitlines())  # on two meshes, each in two ways
    cases = ("shared summed", "none none", "per_head per_head")
    assert compared == {f"agrees {case}": 4 for case in cases}


def test_keys_are_gathered_once_a_layer_whatever_the_number_of_steps():
    rows = [[int(n) for n in line.split()] for line in run(COLLECTIVES).splitlines()]
    steps, gathered, sent, reduced = zip(*rows, strict=True)
    assert steps == (1, 2, 4)
    assert gathered == (2, 2, 2)  # keys, and h for the diagonal
    assert reduced == (0, 0, 0)
    assert sent[1] - sent[0] == (sent[2] - sent[1]) / 2 > 0  # queries and outputs, every step


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_every_pair_is_visited_once_and_the_work_is_equal(devices):
    chunk, block = 6, 3
    count = 2 * devices * chunk // block
    seen = np.zeros((count, count), int)
    parts = balanced(devices, chunk, None).blocks(block)
    tiles = [(starts, blockwise.tiles_of(starts, count, (block, block))) for starts in parts]
    assert len({len(mine) for _, mine in tiles}) == 1
    for starts, mine in tiles:
        for x, y in mine:
            seen[starts[x] // block, y] += 1
    np.testing.assert_array_equal(seen, np.tril(np.ones_like(seen)))


def test_what_does_not_divide_is_said():
    q = jax.ShapeDtypeStruct((1, 48, 2, 3), jnp.float32)
    assert "48 positions" in undivided(Call(q=q, k=q), Split({"context": 5}))
    assert undivided(Call(q=q, k=q), Split({"context": 8})) is None

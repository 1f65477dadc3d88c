"""Training on meshes of eight devices matches training on one, in the losses of 20 steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from cem_jax.config import load_config
from cem_jax.sharding.mesh import in_mesh, make_mesh
from cem_jax.train.setup import abstract_state, fresh_state, place_batch
from cem_jax.train.step import make_train_step

FIELDS = {
    "model.vocab_size": 64, "model.dim": 32, "model.layers": 2, "model.attention.heads": 4,
    "model.mlp.dim": 48, "data.context": 32, "train.global_batch": 8, "train.steps": 20,
    "train.compute_dtype": "float32", "optimizer.learning_rate": 0.01,
}

def losses(sizes, changes):
    config = load_config("configs/base.py", FIELDS | changes)
    count = int(np.prod(list(sizes.values())))
    mesh = make_mesh(sizes, jax.devices()[:count])
    wanted = abstract_state(config, mesh)
    state = fresh_state(config, wanted)
    out = (jax.tree.map(lambda leaf: leaf.sharding, wanted), None)
    step = jax.jit(make_train_step(config, 20, 8), donate_argnums=0, out_shardings=out)
    step = in_mesh(mesh, step)
    rng, found = np.random.default_rng(0), []
    for _ in range(20):
        tokens = rng.integers(0, 64, (8, 33), np.int32)
        state, measured = step(state, place_batch({"tokens": tokens}, mesh))
        found.append(float(measured.loss))
    return np.array(found)

for changes in CHANGES:
    alone = losses({}, changes)
    assert alone[0] > 4.1 and len(set(alone)) == 20
    for sizes in MESHES:
        error = np.abs(losses(sizes, changes) / alone - 1).max()
        print(sizes, changes, error, flush=True)
        assert error < 1e-5, (sizes, changes, error)
"""

MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 2, "fsdp": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "fsdp": 2, "context": 2},
    {"data": 2, "context": 4},
]
EXACT = {
    "model.attention.diagonal_in_update": True,
    "model.attention.preconditioner_heads": "shared",
    "data.document_mask": True,
}
LLAMA = {
    "model.attention.kind": "llama",
    "model.mlp.kind": "gated",
    "model.attention.position": "rope",
    "model.attention.self_bias": False,
}


def check(meshes, changes):
    done = subprocess.run(
        [sys.executable, "-c", f"MESHES, CHANGES = {meshes!r}, {changes!r}\n{SCRIPT}"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_losses_do_not_depend_on_the_mesh():
    check([MESHES[3], MESHES[5]], [{}])


@pytest.mark.slow
def test_losses_depend_on_no_mesh_for_any_kind():
    dense = {"model.attention.implementation": "dense"}
    rope = {"model.attention.position": "rope", "model.attention.diagonal": "per_head"}
    check(MESHES, [{}, EXACT, LLAMA, dense, rope])

"""Fused kernels under meshes of eight devices, against the same call on one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from cem_jax.kernels.call import Inputs
from cem_jax.kernels.over_mesh import share
from cem_jax.sharding.layout import Split

SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import NamedSharding, PartitionSpec as P
from attention_oracle import random_inputs
from cem_jax.kernels import gpu, tpu
from cem_jax.kernels.call import Inputs, Plan
from cem_jax.kernels.over_mesh import backward_over_mesh, forward_over_mesh
from cem_jax.sharding.mesh import make_mesh

def draw(diagonal, values):
    drawn = random_inputs(np.random.default_rng(0), 10, leading=(8,), width=8, diagonal=diagonal,
                          segments=True, values=values)
    dtype = lambda x: jnp.float32 if x.dtype == float else None
    single = {n: jnp.asarray(x, dtype(x)) for n, x in drawn.items()}
    return Inputs(**{**dict.fromkeys(Inputs._fields), **single})

def cosines(s):
    return jnp.cos(jnp.arange(s.size, dtype=s.dtype)).reshape(s.shape)

def run(module, plan, inputs):
    # traced here, so that the mesh in use is the one of this call
    def both(inputs, bar):
        outputs = forward_over_mesh(module.forward, plan)(inputs)
        return outputs, backward_over_mesh(module.backward, plan)(inputs, *outputs, bar)
    shapes = jax.eval_shape(partial(module.forward, plan=plan), inputs)
    return jax.jit(both)(inputs, jax.tree.map(cosines, shapes))

for module in (tpu, gpu):
    for diagonal, context, values in (("shared", "summed", False), ("none", "none", True),
                                      ("per_head", "none", False)):
        plan = Plan(2.0, context, interpret=True)
        inputs = draw(diagonal, values)
        if module.obstacle(inputs, plan):
            continue
        alone = run(module, plan, inputs)
        for sizes in MESHES:
            mesh = make_mesh(sizes)
            rows = NamedSharding(mesh, P(("data", "fsdp")))
            with jax.set_mesh(mesh):
                placed = inputs._replace(q=jax.device_put(inputs.q, rows))
                split = run(module, plan, placed)
            for (path, expected), found in zip(
                jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(split), strict=True
            ):
                error = np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()
                assert error < 2e-6, (module.__name__, diagonal, sizes, path, error)
        print(module.__name__, diagonal, flush=True)
"""


@pytest.mark.parametrize(
    "meshes",
    [
        [{"data": 4, "tensor": 2}],
        pytest.param(
            [{"data": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one", "more"],
)
def test_every_gradient_is_that_of_one_device(meshes):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", f"MESHES = {meshes!r}\n{SCRIPT}"],
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=str(here)),
    )
    assert done.returncode == 0, done.stderr
    assert "kernels.tpu shared" in done.stdout and "kernels.gpu shared" in done.stdout


def test_a_part_is_the_share_of_one_device_or_what_does_not_divide():
    x = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    inputs = Inputs(x(8, 5, 4, 3), x(8, 5, 4, 3), None, x(8, 5, 7), x(8, 5, 7), x(4), None, None)
    part = share(inputs, Split({"data": 4, "tensor": 2}))
    assert part.q.shape == (2, 5, 2, 3)
    assert part.g.shape == part.h.shape == (2, 5, 7)
    assert part.slopes.shape == (2,)
    assert part.v is None
    assert "8 sequences" in share(inputs, Split({"fsdp": 3}))
    assert "4 heads do not divide over the 3" in share(inputs, Split({"tensor": 3}))

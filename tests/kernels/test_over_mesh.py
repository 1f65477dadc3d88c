"""Fused kernels under meshes of eight devices, against the same call on one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from cem_jax.kernels import Call, Scores
from cem_jax.kernels.over_mesh import share, undivided
from cem_jax.sharding.layout import Split

SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import NamedSharding, PartitionSpec as P
from attention_oracle import call_of, random_inputs
from cem_jax.kernels import Options
from cem_jax.kernels.gpu.attention import IMPLEMENTATION as gpu
from cem_jax.kernels.over_mesh import over_mesh
from cem_jax.kernels.tpu.attention import IMPLEMENTATION as tpu
from cem_jax.sharding.mesh import make_mesh

def draw(diagonal, values):
    drawn = random_inputs(np.random.default_rng(0), 10, leading=(8,), width=8, diagonal=diagonal,
                          segments=True, values=values)
    dtype = lambda x: jnp.float32 if x.dtype == float else None
    return call_of(**{n: jnp.asarray(x, dtype(x)) for n, x in drawn.items()})

def cosines(s):
    return jnp.cos(jnp.arange(s.size, dtype=s.dtype)).reshape(s.shape)

def run(kernels, options, call):
    # traced here, so that the mesh in use is the one of this call
    def both(call, bar):
        outputs = over_mesh(kernels).forward(call, options)
        return outputs, over_mesh(kernels).backward(call, options, outputs, bar)
    shapes = jax.eval_shape(lambda call: kernels.forward(call, options), call)
    return jax.jit(both)(call, jax.tree.map(cosines, shapes))

for name, kernels in (("tpu", tpu), ("gpu", gpu)):
    for diagonal, average, values in (("shared", "summed", False), ("none", "none", True),
                                      ("per_head", "none", False)):
        options = Options(2.0, average, "pallas", interpret=True)
        call = draw(diagonal, values)
        if kernels.obstacle(call, options):
            continue
        alone = run(kernels, options, call)
        for sizes in MESHES:
            mesh = make_mesh(sizes)
            rows = NamedSharding(mesh, P(("data", "fsdp")))
            with jax.set_mesh(mesh):
                placed = call._replace(q=jax.device_put(call.q, rows))
                split = run(kernels, options, placed)
            for (path, expected), found in zip(
                jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(split), strict=True
            ):
                error = np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()
                assert error < 2e-6, (name, diagonal, sizes, path, error)
        print(name, diagonal, flush=True)
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
        env=dict(os.environ, PYTHONPATH=f"{here.parent}:{here.parents[1]}"),
    )
    assert done.returncode == 0, done.stderr
    assert "tpu shared" in done.stdout and "gpu shared" in done.stdout


def test_a_part_is_the_share_of_one_device_or_what_does_not_divide():
    x = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    q, g = x(8, 5, 4, 3), x(8, 5, 7)
    call = Call(q=q, k=q, g=g, h=g, scores=Scores(slopes=x(4)))
    assert undivided(call, Split({"data": 4, "tensor": 2})) is None
    part = share(call, Split({"data": 4, "tensor": 2}))
    assert part.q.shape == (2, 5, 2, 3)
    assert part.g.shape == part.h.shape == (2, 5, 7)
    assert part.scores.slopes.shape == (2,)
    assert part.v is None
    assert "8 sequences" in undivided(call, Split({"fsdp": 3}))
    assert "4 heads do not divide over the 3" in undivided(call, Split({"tensor": 3}))

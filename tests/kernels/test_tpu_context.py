"""The streamed TPU kernels where positions are split over devices, against `dense` on one."""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import compiled_quickly
from fused_cases import cotangents, draw, fused, interpreted, plain, relative, run_watched, shapes

from cem_jax.kernels import Options, Outputs, Unavailable, attend, dispatch
from cem_jax.kernels.split_positions import balanced
from cem_jax.kernels.tpu.attention import IMPLEMENTATION
from cem_jax.kernels.tpu.layout import Row, Tables, sizes_of, tables_of

TAU = 6.0
BLOCKS = (128, 128)
SMALL = dict(heads=2, width=12, dim=24)
# devices, positions, what, average, blocks. With two devices, the second one's later chunk comes
# first, so its arrays are not in the order of the sequence.
CASES = {
    "none": (2, 512, dict(values=True), "none", BLOCKS),
    "shared": (4, 1024, dict(diagonal="shared", segments=True), "none", BLOCKS),
    "per-head": (2, 512, dict(diagonal="per_head", segments=True), "none", BLOCKS),
    "exact": (2, 1024, dict(diagonal="shared", slopes=False), "summed", (256, 128)),
}


class Share:
    """One device's inputs and outputs, as an implementation for `fused_cases`."""

    def __init__(self, devices: int, positions: int, device):
        length = positions // (2 * devices)
        self.chunks = balanced(devices, length, device)
        self.positions = self.chunks.own(self.chunks.blocks(1))

    def of(self, x, axis=1):
        return None if x is None else jnp.take(x, self.positions, axis=axis)

    def outputs(self, lse, o, a):
        return Outputs(self.of(lse, 2), self.of(o), self.of(a))

    def inputs(self, inputs):
        return inputs._replace(q=self.of(inputs.q), g=self.of(inputs.g))

    def obstacle(self, inputs, options):
        return IMPLEMENTATION.obstacle(inputs, options)

    def forward(self, inputs, options):
        return IMPLEMENTATION.forward(inputs, options, self.chunks)

    def backward(self, inputs, options, outputs, bar):
        return IMPLEMENTATION.backward(inputs, options, outputs, bar, self.chunks)


@pytest.mark.parametrize("name", CASES)
def test_devices_have_their_share_of_outputs_and_gradients(name):
    devices, positions, what, average, blocks = CASES[name]
    inputs = draw(positions, **SMALL, **what)
    options, bar = interpreted(average, blocks), cotangents(inputs, average)
    outputs, gradients = compiled_quickly(plain(Options(TAU, average)), inputs, bar)(inputs, bar)

    def run(device, inputs, bar):
        share = Share(devices, positions, device)
        return fused(share, options)(share.inputs(inputs), share.outputs(*bar))

    run = compiled_quickly(run, jnp.int32(0), inputs, bar)
    sums = []
    for device in map(jnp.int32, range(devices)):
        share = Share(devices, positions, device)
        found, own = run(device, inputs, bar)
        for x, y in zip(found, share.outputs(*outputs), strict=True):
            assert x is None or relative(x, y) <= 1e-5
        for x, y in zip((own.q, own.g), (gradients.q, gradients.g), strict=True):
            assert x is None or relative(x, share.of(y)) <= 1e-5
        sums.append(own._replace(q=None, g=None))
    total = jax.tree.map(lambda *parts: sum(parts), *sums)
    expected = gradients._replace(q=None, g=None)
    jax.tree.map(lambda x, y: np.testing.assert_array_less(relative(x, y), 1e-5), total, expected)


@pytest.mark.parametrize(("device", "average"), [(0, "summed"), (1, "none")])
def test_unwritten_memory_and_races(device, average, capfd, caplog):
    """The first device's rows are far apart; the second never sees the last keys."""
    devices, positions = 2, 512
    share = Share(devices, positions, device)
    inputs = share.inputs(draw(positions, heads=1, width=12, dim=24, diagonal="shared"))
    (lse, o, _), gradients = run_watched(capfd, caplog, share, inputs, average, BLOCKS)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((lse, o, gradients)))


@pytest.mark.parametrize("blocks", [(128, 128), (256, 128)])
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_no_sum_is_read_while_it_is_written(devices, blocks):
    """A tile's write is complete at the end of the next tile; a read begins one tile ahead.

    Only the first tile waits for its own write.
    """
    chunk, options = 768, Options(TAU, block_sizes=blocks)
    inputs = shapes(2 * devices * chunk, heads=2, width=12)
    if devices > 1:
        asked = lambda x: jax.ShapeDtypeStruct((2, 2 * chunk, *x.shape[2:]), x.dtype)
        inputs = inputs._replace(q=asked(inputs.q), g=asked(inputs.g))
    sizes = sizes_of(inputs, options, BLOCKS, True)
    everything = []
    for device in range(devices):
        chunks = balanced(devices, chunk, device)
        tables = Tables(*map(np.asarray, tables_of(chunks, sizes)))
        starts = np.asarray(chunks.own(chunks.blocks(sizes.queries)))
        np.testing.assert_array_equal(starts[tables.block], tables.place * sizes.queries)
        written, tile = {}, 0
        for x in range(sizes.query_blocks):
            row = Row(x, [tables] if devices > 1 else [], sizes)
            assert tile == row.tiles
            for j in range(sizes.last_key_block(row.place), -1, -1):
                assert (j in written) == (j < row.seen)
                waits = sizes.ratio == 1 and written.get(j) == 0
                assert j not in written or written[j] + (1 if waits else 2) < tile
                written[j], tile = tile, tile + 1
            everything.append(row.place)
    assert sorted(everything) == list(range(sizes.key_blocks // sizes.ratio))


# Which kernel runs.


LENGTH = 1024  # two blocks of 128 for each of four devices


def on(kind: str, platform: str):
    """Pretend to trace for four devices that share positions."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    kinds = dict(axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((4,), ("context",), **kinds))


def attend_and_differentiate(positions, **how):
    """Return (function, arguments): a call with its gradients, and the shapes it takes."""
    call = shapes(positions, heads=2, width=16)

    def run(t, segments):
        whole = lambda t: t._replace(scores=t.scores._replace(segments=segments))
        return jax.grad(lambda t: attend(whole(t), Options(TAU, **how)).o.sum())(t)

    return run, (call.floating, call.scores.segments)


def lowered(positions, platform, **how) -> str:
    run, arguments = attend_and_differentiate(positions, **how)
    return jax.jit(run).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("implementation", ["auto", "pallas"])
def test_split_positions_run_streamed_on_a_tpu(implementation):
    with on("TPU v5p", "tpu"):
        text = lowered(LENGTH, "tpu", implementation=implementation)
    assert text.count("tpu_custom_call") == 2
    assert "tpu_streamed_forward" in text and "tpu_streamed_backward" in text


def test_what_the_kernels_cannot_split_runs_blockwise_for_a_logged_reason(caplog):
    dispatch._say_once.cache_clear()
    with on("TPU v5p", "tpu"), caplog.at_level(logging.WARNING, "cem_jax.kernels"):
        assert "tpu_custom_call" not in lowered(LENGTH // 2, "tpu")
        assert "into chunks of 64" in caplog.text
        with pytest.raises(Unavailable, match="into chunks of 64"):
            lowered(LENGTH // 2, "tpu", implementation="pallas")
        with pytest.raises(Unavailable, match="query blocks of 256 do not divide"):
            lowered(LENGTH, "tpu", implementation="pallas", block_sizes=(256, 128))
    with on("NVIDIA H200", "gpu"):
        assert "triton" not in lowered(LENGTH, "cuda")
        with pytest.raises(Unavailable, match="take whole sequences"):
            lowered(LENGTH, "cuda", implementation="pallas")
    assert [record.message.count("blockwise") for record in caplog.records] == [1, 1]


# Under a mesh, in processes of their own: JAX starts with one CPU device here.

OVER_MESHES = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import math
import jax.numpy as jnp, numpy as np
from fused_cases import draw
from cem_jax.kernels import Options, attend
from cem_jax.sharding.mesh import make_mesh

def results(inputs, average, **how):
    def loss(t):
        t = t._replace(scores=t.scores._replace(segments=inputs.scores.segments))
        parts = [x for x in attend(t, Options(6.0, average, **how)) if x is not None]
        return sum(jnp.sin(x + 1).sum() for x in parts), parts
    return jax.jit(jax.grad(loss, has_aux=True))(inputs.floating)

for sizes, positions, diagonal, average in CASES:
    inputs = draw(positions, batch=2, heads=2, width=12, dim=24, diagonal=diagonal, segments=True)
    alone = results(inputs, average, implementation="dense")
    devices = jax.devices()[: math.prod(sizes.values())]
    with jax.set_mesh(make_mesh(sizes, devices)):
        split = results(inputs, average, implementation="pallas", interpret=True)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(split),
                            strict=True):
        error = np.linalg.norm(x - y) / np.linalg.norm(x)
        assert error < 1e-5, (sizes, diagonal, path, error)
    print(sizes, diagonal, average, flush=True)
"""

COMPILED = """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from test_tpu_context import attend_and_differentiate
from cem_jax.sharding.mesh import make_mesh
from cem_jax.aot.topology import open_topology

mesh = make_mesh({"context": 4}, open_topology("v5e:2x2").devices)
placed = NamedSharding(mesh, P(None, "context"))
whole = NamedSharding(mesh, P())
run, arguments = attend_and_differentiate(4096, implementation="auto")
give = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed if x.ndim > 1 else whole)
with jax.set_mesh(mesh):
    text = jax.jit(run).trace(*jax.tree.map(give, arguments)).lower().compile().as_text()
print("tpu_streamed_forward" in text, "tpu_streamed_backward" in text, "while" in text)
"""


def run_script(script: str, **environment: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | dict(PYTHONPATH=f"{here}:{here.parent}:{here.parents[1]}") | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "cases",
    [
        [({"context": 4}, 1024, "shared", "summed")],
        pytest.param(
            [
                ({"context": 2}, 512, "none", "none"),
                ({"data": 2, "context": 2, "tensor": 2}, 1024, "per_head", "none"),
                ({"context": 4}, 2048, "shared", "none"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one", "more"],
)
def test_outputs_and_gradients_over_a_mesh_are_those_of_one_device(cases):
    found = run_script(f"CASES = {cases!r}\n{OVER_MESHES}")
    assert len(found.splitlines()) == len(cases)


has_libtpu = os.environ.get("TPU_LIBRARY_PATH") or importlib.util.find_spec("libtpu")


@pytest.mark.slow
@pytest.mark.skipif(not has_libtpu, reason="no libtpu: neither installed nor TPU_LIBRARY_PATH set")
def test_four_tpus_that_share_positions_have_the_kernels():
    assert run_script(COMPILED).split() == ["True", "True", "False"]

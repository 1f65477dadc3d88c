"""The `energies` lines of a run, on one device and on a mesh."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from cem_jax.runs.metrics import read_metrics
from cem_jax.runs.training import train
from cem_jax.sharding.mesh import make_mesh
from cem_jax.train.probe import make_probe

ONE = dict(data=1, fsdp=1, tensor=1, context=1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return str(tiny.tiny_dataset(tmp_path_factory.mktemp("data")))


def test_lines_appear_at_their_interval(dataset, tmp_path):
    config = tiny.tiny_config(data__path=dataset, log__energies_every=3, train__steps=7)
    train(config, tmp_path)
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "energies"]
    assert [line["step"] for line in lines] == [3, 6]
    layers = config.model.layers
    for line in lines:
        assert line["sequences"] == 4
        for name in ("attention", "mlp"):
            found, steps = line[name], getattr(config.model, name).steps
            assert np.shape(found["energy"]) == (layers, steps + 1)
            assert np.shape(found["cosine"]) == (layers, steps - 1)
            np.testing.assert_allclose(
                found["energy_change"], np.diff(found["energy"]), rtol=1e-3, atol=1e-4
            )
            # P starts as softplus(1) times the identity and has hardly moved
            for field in ("smallest_eigenvalue", "largest_eigenvalue"):
                np.testing.assert_allclose(found[field], [np.log1p(np.e)] * layers, rtol=0.1)


def test_none_unless_asked_for(dataset, tmp_path):
    train(tiny.tiny_config(data__path=dataset, train__steps=2), tmp_path)
    assert "energies" not in {line["kind"] for line in read_metrics(tmp_path)}


def test_no_layer_with_an_energy():
    llama = {"model__attention__kind": "llama", "model__mlp__kind": "gated"}
    config = tiny.tiny_config(**llama, model__attention__self_bias=False, log__energies_every=1)
    assert make_probe(config, make_mesh(ONE, jax.devices()[:1])) is None


MESHES = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from cem_jax.config import load_config
from cem_jax.sharding.mesh import make_mesh
from cem_jax.train.probe import make_probe
from cem_jax.train.setup import abstract_state, fresh_state, place_batch

config = load_config("configs/base.py", {
    "model.vocab_size": 64, "model.dim": 32, "model.layers": 2, "model.attention.heads": 4,
    "model.mlp.dim": 48, "data.context": 32, "train.global_batch": 8, "train.steps": 20,
    "log.energies_every": 1,
})
tokens = np.random.default_rng(0).integers(0, 64, (8, 33), np.int32)

def values(tokens, **sizes):
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    state = fresh_state(config, abstract_state(config, mesh))
    return make_probe(config, mesh)(state.params, place_batch({"tokens": tokens}, mesh))

# each of two shards takes its first two rows; a single shard takes its first four
one = values(tokens[[0, 1, 4, 5, 2, 3, 6, 7]], data=1)
many = values(tokens, fsdp=2, tensor=2, context=2)
assert one["sequences"] == many["sequences"] == 4
same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
jax.tree.map(same, one, many)
"""


def test_a_mesh_changes_nothing():
    done = subprocess.run(
        [sys.executable, "-c", MESHES],
        capture_output=True,
        text=True,
        cwd=Path(tiny.BASE).parents[1],
    )
    assert done.returncode == 0, done.stderr

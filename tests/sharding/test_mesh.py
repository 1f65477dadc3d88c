import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cem_jax.errors import UserError
from cem_jax.sharding.axes import LOGICAL_RULES, MESH_AXES
from cem_jax.sharding.layout import spec_for
from cem_jax.sharding.mesh import batch_sharding, make_mesh, optimizer_shardings, shardings


def on_eight_devices(script):
    lines = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n" + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rules_name_mesh_axes_only():
    assert {axis for axes in LOGICAL_RULES.values() for axis in axes} == set(MESH_AXES)


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ((), P()),
        (("layers", "heads", "head_dim", "embed"), P(None, "tensor", None, "fsdp")),
        (("layers", "mlp", "embed"), P(None, "tensor", "fsdp")),
        (("vocab", "embed"), P("tensor", "fsdp")),
        (("embed", "rank"), P("fsdp", None)),
        (("features", "embed"), P("tensor", "fsdp")),
        (("embed", "embed"), P("fsdp", None)),
        (("heads", "mlp"), P("tensor", None)),
        (("batch", "sequence", "embed"), P(("data", "fsdp"), "context", None)),
        (("embed", "batch"), P("fsdp", "data")),
        ((None, "heads"), P(None, "tensor")),
    ],
)
def test_spec_for(axes, spec):
    assert spec_for(axes) == spec


def test_unknown_logical_axis():
    with pytest.raises(ValueError, match="unknown dimension 'head'"):
        spec_for(("head",))


def test_one_device_is_a_mesh():
    mesh = make_mesh({"data": -1, "fsdp": 1, "tensor": 1, "context": 1})
    assert dict(mesh.shape) == dict.fromkeys(MESH_AXES, 1)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert batch_sharding(mesh).spec == P(("data", "fsdp"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 2}, "mesh: data=2 needs 2 devices; there is 1"),
        ({"data": -1, "tensor": 3}, "mesh: data=-1, tensor=3 needs a multiple of 3 devices"),
        ({"data": -1, "fsdp": -1}, "mesh.data: only one axis may be -1, not also mesh.fsdp"),
        ({"data": 0}, "mesh.data: expected a positive number"),
        ({"model": 1}, "mesh.model: no such axis"),
    ],
)
def test_sizes_that_do_not_multiply_out(sizes, message):
    with pytest.raises(UserError) as error:
        make_mesh(sizes)
    assert message in str(error.value)


def test_shardings_keep_the_tree():
    mesh = make_mesh({})
    tree = shardings(mesh, {"a": {"w": ("embed", "mlp")}, "scale": (), "list": [("vocab",)]})
    assert tree["a"]["w"].spec == P("fsdp", "tensor")
    assert tree["scale"].spec == P()
    assert tree["list"][0].spec == P("tensor")


OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "masked": optax.masked(optax.adam(0.1), {"a": {"w": True, "b": False}, "w": True}),
    "accumulated": optax.MultiSteps(optax.adam(0.1), 2),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "skipping": optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_lies_as_the_parameters_do(name):
    mesh = make_mesh({})
    shape = jax.ShapeDtypeStruct
    params = {
        "a": {"w": shape((4, 6), jnp.float32), "b": shape((6,), jnp.float32)},
        "w": shape((8, 2), jnp.float32),
    }
    axes = {"a": {"w": ("embed", "mlp"), "b": ("mlp",)}, "w": ("vocab", "embed")}
    state = jax.eval_shape(OPTIMIZERS[name].init, params)
    got = optimizer_shardings(mesh, state, params, shardings(mesh, axes))
    assert jax.tree.structure(got) == jax.tree.structure(state)
    specs = {(4, 6): P("fsdp", "tensor"), (6,): P("tensor"), (8, 2): P("tensor", "fsdp")}
    seen = set()
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(got), strict=True):
        if name == "factored" and len(leaf.shape) == 1:
            continue  # row and column factors: checked below
        assert sharding.spec == specs.get(leaf.shape, P()), (leaf, sharding)
        seen.add(leaf.shape)
    if name == "factored":
        assert got[0].v_row["a"]["w"].spec == P()
        assert got[0].v["a"]["b"].spec == P("tensor")
    else:
        assert (4, 6) in seen and (8, 2) in seen


def test_a_mesh_of_eight_devices():
    on_eight_devices("""
        from cem_jax.errors import UserError
        from cem_jax.sharding.mesh import make_mesh

        mesh = make_mesh({"data": -1, "tensor": 2, "context": 2})
        assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 2, "context": 2}
        assert sorted(d.id for d in mesh.devices.flat) == list(range(8))
        part = make_mesh({"fsdp": -1}, jax.devices()[:4])
        assert part.size == 4 and set(part.devices.flat) == set(jax.devices()[:4])
        for sizes in ({"data": 4}, {"data": -1, "tensor": 3}, {"data": 16}):
            try:
                make_mesh(sizes)
            except UserError as error:
                assert "there are 8" in str(error)
            else:
                raise AssertionError(sizes)
    """)


@dataclass(frozen=True)
class Chip:
    """As much of a TPU's device as meshes ask for."""

    id: int
    slice_index: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


CHIPS = [Chip(8 * s + 2 * x + y, s, s, (x, y, 0)) for s in (0, 1) for x in range(4) for y in (0, 1)]


@pytest.mark.parametrize(
    ("sizes", "crossing"),
    [({"data": 2, "fsdp": 8}, 0), ({"data": 4, "tensor": 4}, 0), ({"fsdp": 16}, 1)],
)
def test_only_data_or_fsdp_crosses_between_slices(sizes, crossing):
    mesh = make_mesh(sizes, CHIPS)
    slices = np.vectorize(lambda chip: chip.slice_index, otypes=[int])(mesh.devices)
    half = slices.shape[crossing] // 2
    first, second = np.split(slices, [half], axis=crossing)
    assert (first == 0).all() and (second == 1).all()


def test_axes_that_cannot_cross_between_slices():
    with pytest.raises(UserError, match="none is a multiple of the 2 slices"):
        make_mesh({"tensor": 16}, CHIPS)


def test_the_initial_state_does_not_depend_on_the_mesh():
    """Every bit of it, and each device holds its part alone."""
    on_eight_devices("""
        import hashlib
        import numpy as np
        from cem_jax.config import load_config
        from cem_jax.sharding.mesh import make_mesh
        from cem_jax.train.setup import abstract_state, fresh_state

        sizes = {"vocab_size": 64, "dim": 32, "layers": 2, "attention.heads": 8, "mlp.dim": 40}
        config = load_config(
            "configs/base.py", {f"model.{name}": size for name, size in sizes.items()}
            | {"train.steps": 10},
        )
        found = set()
        for sizes in (
            {"data": 1}, {"data": 8}, {"fsdp": 8}, {"tensor": 8}, {"tensor": 2, "fsdp": 4},
            {"data": 2, "fsdp": 2, "tensor": 2}, {"context": 4, "fsdp": 2},
        ):
            count = np.prod(list(sizes.values()))
            mesh = make_mesh(sizes, jax.devices()[:count])
            wanted = abstract_state(config, mesh)
            state = fresh_state(config, wanted)
            content = hashlib.sha256()
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True)
            for array, shape in pairs:
                assert array.sharding == shape.sharding
                names = jax.tree.leaves(tuple(shape.sharding.spec))
                split = np.prod([mesh.shape[name] for name in names])
                assert array.addressable_shards[0].data.size * split == array.size
                content.update(np.asarray(array).tobytes())
            found.add(content.hexdigest())
        assert len(found) == 1, found
    """)

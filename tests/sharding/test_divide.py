"""What does not divide over a mesh, and that the sizes offered instead are accepted."""

import itertools

import jax
import pytest
import tiny

from cem_jax.config import load_config, split_sizes
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.sharding.axes import LOGICAL_RULES
from cem_jax.sharding.divide import Size, resolve_sizes, size_faults, undivided

SPLIT = [
    Size("vocabulary", 17, "vocab", least=17),
    Size("width", 66, "embed", multiple=6),
    Size("heads", 6, "heads", divides=("width", 66)),
    Size("hidden", 3, "mlp"),
    Size("positions", 7, "sequence"),
    Size("rows", 4, "batch", divides=("batch", 12)),
]


def test_all_that_does_not_divide_is_named_with_sizes_that_do():
    stated = {"data": 2, "fsdp": 4, "tensor": 4, "context": 2}
    assert undivided(SPLIT, stated) == [
        "vocabulary: 17 is not a multiple of mesh.tensor 4; nearest: mesh.tensor 1 or vocabulary "
        "20",
        "width: 66 is not a multiple of mesh.fsdp 4; nearest: mesh.fsdp 2 or width 60, 72",
        "heads: 6 is not a multiple of mesh.tensor 4; nearest: mesh.tensor 1",
        "hidden: 3 is not a multiple of mesh.tensor 4; nearest: mesh.tensor 1 or hidden 4",
        "positions: 7 is not a multiple of mesh.context 2 × 2 chunks, 4; nearest: mesh.context 1 "
        "or positions 4, 8",
        "rows: 4 is not a multiple of mesh.data 2 × mesh.fsdp 4, 8; nearest: mesh.data 1 or "
        "mesh.fsdp 2",
    ]
    assert undivided(SPLIT, {"data": 4, "tensor": -1}) == []


def test_a_mesh_of_all_devices_is_not_advised_to_change_one_axis():
    (fault,) = undivided(SPLIT, {"data": 8}, resolved=True)
    assert fault == "rows: 4 is not a multiple of mesh.data 8; no divisor of batch 12 is"


def test_faulty_sizes_are_named_all_at_once():
    sizes = {"data": -1, "fsdp": -1, "tensor": 0, "model": 1}
    assert size_faults(sizes) == [
        "mesh.model: no such axis",
        "mesh.tensor: expected a positive number of devices or -1 (what is left), got 0",
        "mesh.data: only one axis may be -1, not also mesh.fsdp",
    ]
    with pytest.raises(UserError):
        resolve_sizes(sizes, 8)
    assert resolve_sizes({"data": -1, "tensor": 2}, 8) == (4, 1, 2, 1)


MODELS = [
    {},
    {"model.attention.position": "rope"},
    {"train.microbatch": 48, "train.global_batch": 96},
]
MESHES = [
    {"tensor": 3}, {"tensor": 8}, {"fsdp": 3}, {"data": 5}, {"data": 7, "fsdp": 3}, {"context": 3},
    {"data": 16, "fsdp": 16}, {"fsdp": 24, "tensor": 5}, {"tensor": 6, "context": 7},
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_size_that_is_offered_is_accepted(model, mesh):
    """No rule objects to the field it is offered for, nor anything new to the rest."""
    given = model | {"train.steps": 10} | {f"mesh.{axis}": size for axis, size in mesh.items()}
    with pytest.raises(UserError) as refusal:
        load_config(tiny.BASE, given)
    before = {message.partition(":")[0] for message in refusal.value.messages}
    for message in refusal.value.messages:
        blamed, advice = message.partition(":")[0], message.partition("; nearest: ")[2]
        for change in changes(advice):
            try:
                load_config(tiny.BASE, given | change)
            except UserError as error:
                left = {line.partition(":")[0] for line in error.messages}
                assert left <= before - {blamed}, (change, error.messages)


def changes(advice):
    """Every set of fields that `a.x 1, 2 and a.y 3 or b.z 4` offers."""
    for way in filter(None, advice.split(" or ")):
        offers = [offer.partition(" ") for offer in way.split(" and ")]
        for sizes in itertools.product(*(sizes.split(", ") for _, _, sizes in offers)):
            yield {name: int(size) for (name, _, _), size in zip(offers, sizes, strict=True)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model.attention.kind": "llama", "model.mlp.kind": "gated"},
        {"model.attention.diagonal": "per_head", "model.tie_embeddings": True},
        {"model.mlp.preconditioner": "diagonal_low_rank"},
    ],
)
def test_each_split_dimension_of_a_parameter_has_the_size_of_a_field(fields):
    """So that fields which divide are parameters that do."""
    config = load_config(tiny.BASE, fields | {"train.steps": 10, "model.mlp.dim": 640})
    sizes = {one.dim: one.size for one in split_sizes(config)}
    split = {dim for dim, axes in LOGICAL_RULES.items() if axes} - {"features"}
    assert set(sizes) == split

    def check(info):
        for size, dim in zip(info.shape, info.axes, strict=True):
            assert dim not in split or size == sizes[dim], info

    jax.tree.map(check, pure.describe(config.model))

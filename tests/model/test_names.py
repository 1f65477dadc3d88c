"""The choices that a configuration allows are the keys of the tables that they index."""

from typing import get_args

import pytest

from cem_jax.config import fields
from cem_jax.energy.activation import ACTIVATIONS
from cem_jax.kernels import IMPLEMENTATIONS
from cem_jax.model.transformer import ATTENTION, MLP

TABLES = {
    "model.mlp.activation": ACTIVATIONS,
    "model.attention.kind": ATTENTION,
    "model.mlp.kind": MLP,
    "model.attention.implementation": IMPLEMENTATIONS,
}


@pytest.mark.parametrize("field", TABLES)
def test_the_choices_are_the_table(field):
    assert set(get_args(fields()[field])) == {*TABLES[field]}

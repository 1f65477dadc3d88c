"""The bits of a seed are the same whatever JAX's variables say of generators and widths."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.model import pure

SCRIPT = """
import sys, hashlib, numpy as np, jax
sys.path.insert(0, sys.argv[1])
from tiny import tiny_config
from cem_jax.runs.setup import configure_jax
from cem_jax.studies.synthetic.data import Data, make_data
from cem_jax.studies.synthetic.models import MODELS
from cem_jax.studies.synthetic.training import fit
from cem_jax.train.step import initial_state
drawn = Data(*(np.stack([array]) for array in make_data("rbf", 0, 16, 16)))
errors = fit(next(iter(MODELS.values())), drawn, 1, 2)
config = tiny_config(seed=3)
configure_jax(config)
leaves = [*jax.tree.leaves(jax.jit(lambda: initial_state(config).params)()), *errors]
digest = hashlib.sha256()
for leaf in leaves:
    digest.update(str(leaf.dtype).encode() + np.asarray(leaf).tobytes())
print(digest.hexdigest())
"""
ASKED = [
    {"JAX_DEFAULT_PRNG_IMPL": "rbg"},
    {"JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg", "JAX_RANDOM_SEED_OFFSET": "7"},
    {"JAX_THREEFRY_PARTITIONABLE": "0", "JAX_ENABLE_X64": "1"},
]


def drawn_with(variables: dict[str, str]) -> str:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1])]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def undisturbed():
    return drawn_with({})


@pytest.mark.parametrize("variables", ASKED, ids=lambda variables: "+".join(variables))
def test_jax_variables_of_generators_change_no_bit(variables, undisturbed):
    assert drawn_with(variables) == undisturbed


@pytest.mark.parametrize("seed", [0, 3, 2**31, 2**32 - 1])
def test_seeded_is_the_default_key_of_the_seed(seed):
    np.testing.assert_array_equal(
        jax.random.key_data(pure.seeded(seed)), jax.random.key_data(jax.random.key(seed))
    )
    assert pure.seeded(seed).dtype == jax.random.key(0).dtype
    assert jnp.shape(pure.seeded(seed)) == ()

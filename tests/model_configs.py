"""Small model configurations, by the fields that a test is about, and parameters for them."""

import dataclasses
import functools
import zlib

import jax
import numpy as np

from cem_jax.config import AttentionConfig, MLPConfig, ModelConfig
from cem_jax.model import pure

_ATTENTION = AttentionConfig(
    kind="cem",
    heads=2,
    steps=1,
    step_size=1.0,
    learn_step_size=False,
    diagonal="none",
    diagonal_init=0.0,
    diagonal_in_update=False,
    position="alibi",
    alibi_slopes="power_of_two",
    self_bias=False,
    rope_base=10_000.0,
    tau="sqrt_head_dim",
    preconditioner="none",
    preconditioner_rank=2,
    preconditioner_form="symmetric",
    preconditioner_init="paper",
    preconditioner_heads="per_head",
    update="autodiff",
    implementation="dense",
    block_sizes=None,
    remat_steps=False,
)
_MLP = MLPConfig(
    kind="cem",
    dim=12,
    steps=1,
    step_size=1.0,
    learn_step_size=False,
    activation="silu",
    preconditioner="none",
    preconditioner_rank=3,
    preconditioner_form="symmetric",
    preconditioner_init="paper",
    update="autodiff",
    remat_steps=False,
)
_MODEL = ModelConfig(
    vocab_size=11,
    dim=8,
    layers=2,
    residual="prenorm",
    step_norm="shared",
    norm_gradient="at_u",
    norm_eps=1e-6,
    init_std=0.02,
    tie_embeddings=False,
    scan_layers=True,
    remat="none",
    attention=_ATTENTION,
    mlp=_MLP,
)
_NAMES = {cls: {f.name for f in dataclasses.fields(cls)} for cls in (ModelConfig, AttentionConfig)}


def model_config(**fields) -> ModelConfig:
    """The plainest CEM at a tiny size, but for `fields`: those of the model and of its attention by
    name, those of its MLP with `mlp_` in front."""
    model = {name: fields.pop(name) for name in list(fields) if name in _NAMES[ModelConfig]}
    attention = {name: fields.pop(name) for name in list(fields) if name in _NAMES[AttentionConfig]}
    mlp = {name.removeprefix("mlp_"): value for name, value in fields.items()}
    return dataclasses.replace(
        _MODEL,
        **model,
        attention=dataclasses.replace(_ATTENTION, **attention),
        mlp=dataclasses.replace(_MLP, **mlp),
    )


def full_config(**fields) -> ModelConfig:
    """The paper's CEM: two steps, shared diagonal, self bias, preconditioners."""
    full = dict(
        steps=2,
        mlp_steps=2,
        diagonal="shared",
        self_bias=True,
        preconditioner="diagonal_low_rank",
        mlp_preconditioner="diagonal_low_rank",
    )
    return model_config(**full | fields)


@functools.cache
def random_parameters(config: ModelConfig, dtype=np.float64) -> dict:
    """A parameter tree with nothing at a special value; a name and shape draw the same always.

    Kept for the next caller: copy before changing.
    """

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        rng = np.random.default_rng([zlib.crc32(name.encode()), *leaf.shape])
        centre = 1.0 if "norm" in name or "eta" in name else 0.0
        return (centre + 0.4 * rng.normal(size=leaf.shape)).astype(dtype)

    return jax.tree_util.tree_map_with_path(draw, pure.abstract_parameters(config))

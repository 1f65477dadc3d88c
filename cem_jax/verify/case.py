"""The models that are verified: switches, layer shapes, and random values in every parameter.

Shapes: B = 1 sequence · J positions · D model dim.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from cem_jax.config import Config, ModelConfig
from cem_jax.energy.activation import ACTIVATIONS
from cem_jax.model import Block
from cem_jax.model.parameters import with_values
from cem_jax.model.pure import describe

_POSITIONS = 16
# Small enough that 16 positions need several tiles, the last ones ragged.
_BLOCK_SIZES = (6, 5)


@dataclass(frozen=True)
class Case:
    """A model to check. All values are float32, so every dtype starts from the same numbers."""

    title: str
    model: ModelConfig
    dtypes: tuple[str, ...]
    parameters: Any  # the Transformer's tree, NumPy float32
    tokens_J: np.ndarray  # all different: each embedding row belongs to one position
    segments_J: np.ndarray | None
    seed: int
    both_ways: bool = False  # also run the whole model with another implementation and update

    @property
    def shape(self) -> str:
        """The sizes of the whole model."""
        c = self.model
        steps = f"T{c.attention.steps}+{c.mlp.steps}"
        return f"{self._sizes} K{c.attention.heads} R{c.head_dim} M{c.mlp.dim} {steps}"

    @property
    def has_energy(self) -> bool:
        """Whether a sublayer is CEM's."""
        return "cem" in (self.model.attention.kind, self.model.mlp.kind)

    @property
    def switches(self) -> str:
        """The switches in words."""
        c = self.model
        parts = [_attention_words(c), _mlp_words(c)]
        if self.has_energy:
            norm = "no norm" if c.step_norm == "none" else f"{c.step_norm} norm {c.norm_gradient}"
            parts.append(f"{c.residual}, {norm}")
        if self.segments_J is not None:
            parts.append("document mask")
        return "; ".join(parts)

    def layer_shape(self, name: str, steps: int | None = None) -> str:
        """Return the sizes of sublayer `name`, `attention` or `mlp`, with T = `steps`."""
        c = self.model
        inner = {"attention": f"K{c.attention.heads} R{c.head_dim}", "mlp": f"M{c.mlp.dim}"}[name]
        return f"{self._sizes} {inner} T{steps or getattr(c, name).steps}"

    @property
    def _sizes(self) -> str:
        return f"J{self.positions} D{self.model.dim}"

    @property
    def positions(self) -> int:
        return len(self.tokens_J)

    def layer(self, name: str) -> Any:
        """Return the first layer's parameters of sublayer `name`, `attention` or `mlp`."""
        return jax.tree.map(lambda leaf: leaf[0], self.parameters["blocks"][name])

    def states(self, count: int) -> list[np.ndarray]:
        """Return random arrays [1, J, D], the same in every call."""
        rng = np.random.default_rng(self.seed)
        shape = (1, self.positions, self.model.dim)
        return [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]


def config_case(config: Config) -> Case:
    """Return a case of one of the config's own layers; sequence and vocabulary are shortened."""
    case = make_case(
        "the config's own layer",
        replace(config.model, layers=1),
        min(config.data.context, _POSITIONS),
        config.seed,
        ("float64", "float32", "bfloat16"),
        document_mask=config.data.document_mask,
    )
    return replace(case, both_ways=True)


def small_case(config: Config) -> Case:
    """Return a case of two layers with the config's switches at small random sizes."""
    rng = np.random.default_rng((config.seed, 1))
    heads, half_width = rng.integers(1, 5), rng.integers(1, 4)
    model = _resized(config.model, rng, int(heads), 2 * int(half_width))
    positions = int(rng.integers(7, 14))
    return make_case(
        "the config's switches at a small random size",
        model,
        positions,
        config.seed + 1,
        ("float64", "float32"),
        document_mask=config.data.document_mask,
    )


def random_case(config: Config) -> Case:
    """Return a case of two CEM layers with random switches at small random sizes."""
    rng = np.random.default_rng((config.seed, 2))
    pick = lambda *values: values[rng.integers(len(values))]
    heads, half_width = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    diagonal = pick("shared", "per_head")
    attention = replace(
        config.model.attention,
        kind="cem",
        diagonal=diagonal,
        diagonal_in_update=pick(True, False),
        position=pick("alibi", "rope", "none"),
        alibi_slopes=pick("power_of_two", "press"),
        self_bias=pick(True, False),
        preconditioner=pick("none", "diagonal", "diagonal_low_rank"),
        preconditioner_form=pick("symmetric", "psd"),
        preconditioner_heads=pick("per_head", "shared"),
        steps=int(rng.integers(1, 4)),
        step_size=0.7,
        learn_step_size=pick(True, False),
    )
    mlp = replace(
        config.model.mlp,
        kind="cem",
        activation=pick(*ACTIVATIONS),
        preconditioner=pick("none", "diagonal", "diagonal_low_rank"),
        preconditioner_form=pick("symmetric", "psd"),
        steps=int(rng.integers(1, 4)),
        step_size=0.7,
        learn_step_size=pick(True, False),
    )
    model = replace(
        config.model,
        attention=attention,
        mlp=mlp,
        residual=pick("prenorm", "normalized"),
        step_norm=pick("shared", "separate", "weightless", "none"),
        norm_gradient=pick("at_u", "scaled", "full"),
    )
    return make_case(
        "random switches at a small random size",
        _resized(model, rng, heads, 2 * half_width),
        int(rng.integers(7, 14)),
        config.seed + 2,
        ("float64",),
        document_mask=bool(pick(True, False)),
    )


def make_case(
    title: str,
    model: ModelConfig,
    positions: int,
    seed: int,
    dtypes: tuple[str, ...],
    *,
    document_mask: bool = False,
) -> Case:
    """Return a case of `model`, its vocabulary just larger than the sequence, random parameters."""
    rng = np.random.default_rng((seed, 3))
    vocab_size = positions + 3
    demanded = model.attention.implementation
    attention = replace(
        model.attention,
        block_sizes=_BLOCK_SIZES,
        implementation="auto" if demanded == "pallas" else demanded,  # float64 is never fused
    )
    model = replace(model, vocab_size=vocab_size, attention=attention)
    segments_J = np.arange(positions) // max(1, positions // 2) if document_mask else None
    tokens_J = rng.permutation(vocab_size)[:positions].astype(np.int32)
    parameters = random_parameters(model, rng)
    return Case(title, model, dtypes, parameters, tokens_J, segments_J, seed)


def random_parameters(model: ModelConfig, rng: np.random.Generator) -> Any:
    """Return random parameters: no term of any equation vanishes, and logits are of order 1.

    P is positive definite: its low-rank part is kept below the diagonal's smallest entry.
    """

    def draw(path, info):
        names = [str(entry.key) for entry in path]
        spread = rng.standard_normal(info.shape)
        match names[-1]:
            case "embedding" | "self_bias":
                value = spread
            case "norm" | "step_norm":
                value = np.clip(1.0 + 0.3 * spread, 0.2, None)
            case "diagonal":  # h·(d∘u)/τ of order 1
                value = model.tau / np.sqrt(model.dim) * (0.3 + spread)
            case "p":  # the argument of softplus is p√D
                value = (1.0 + 0.1 * spread) / np.sqrt(model.dim)
            case "left" | "right":  # norms of 0.4 or slightly more: 2 × 0.4² < softplus(0.6)
                width = np.sqrt(info.shape[-2]) + np.sqrt(info.shape[-1])
                value = 0.4 * spread / width
            case "eta":
                start = getattr(model, names[-2]).step_size
                value = np.full(info.shape, 0.9 * start)
            case _:  # weights, so that projections are of order 1
                value = spread / np.sqrt(model.dim)
        return value.astype(np.float32)

    return jax.tree.map_with_path(draw, describe(model))


def sublayer(model: ModelConfig, name: str, parameters: Any) -> nnx.Module:
    """Return sublayer `attention` or `mlp` with these parameters; call it in a traced function."""
    return with_values(lambda: getattr(Block(model, rngs=nnx.Rngs(params=0)), name), parameters)


def _attention_words(c: ModelConfig) -> str:
    a = c.attention
    position = f"{a.position} ({a.alibi_slopes})" if a.position == "alibi" else a.position
    words = [f"{a.kind} attention", f"position {position}"]
    if a.self_bias:
        words.append("self bias")
    if a.kind == "cem":
        exact = " in the update" if a.diagonal_in_update else ""
        words += [f"diagonal {a.diagonal}{exact}", _preconditioner_words(a)]
    return ", ".join(words)


def _mlp_words(c: ModelConfig) -> str:
    words = [f"{c.mlp.kind} MLP", c.mlp.activation]
    return ", ".join([*words, _preconditioner_words(c.mlp)] if c.mlp.kind == "cem" else words)


def _preconditioner_words(settings) -> str:
    if settings.preconditioner == "none":
        return "no P"
    form = settings.preconditioner_form
    low_rank = settings.preconditioner == "diagonal_low_rank"
    words = f"P {form} of rank {settings.preconditioner_rank}" if low_rank else "P diagonal"
    heads = getattr(settings, "preconditioner_heads", None)
    return words + (f" {heads}" if heads else "")


def _resized(model: ModelConfig, rng, heads: int, width: int) -> ModelConfig:
    return replace(
        model,
        dim=heads * width,
        layers=2,
        attention=replace(
            model.attention, heads=heads, preconditioner_rank=int(rng.integers(1, 4))
        ),
        mlp=replace(
            model.mlp, dim=int(rng.integers(3, 20)), preconditioner_rank=int(rng.integers(1, 4))
        ),
    )

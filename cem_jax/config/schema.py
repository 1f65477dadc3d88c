"""The configuration as frozen, validated dataclasses; `configs/base.py` says what each field means.

A configuration comes from a Python file whose `get_config()` returns a ConfigDict (`load_config`)
or from JSON (`Config.from_dict`). Both report every violation at once, in one `UserError`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_type_hints

from cem_jax.config.file import read_config_file
from cem_jax.config.names import unknown
from cem_jax.config.rules import violations
from cem_jax.config.values import Range, coerce, parse
from cem_jax.errors import UserError
from cem_jax.text import plain

Count = Annotated[int, Range(low=1)]
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]
Moment = Annotated[float, Range(low=0, below=1)]
Seed = Annotated[int, Range(low=0, high=2**32 - 1)]
Axis = Annotated[int, Range(low=-1)]

PreconditionerKind = Literal["none", "diagonal", "diagonal_low_rank"]
PreconditionerForm = Literal["symmetric", "psd"]
PreconditionerInit = Literal["paper", "identity"]
Update = Literal["autodiff", "closed_form"]

# Pairs of which at most one is set: an override that sets one unsets the other.
_ALTERNATIVES = (("train.steps", "train.tokens"), ("data.path", "data.mixture"))
_UNSET = {"train.steps": None, "train.tokens": None, "data.path": "", "data.mixture": ()}


@dataclass(frozen=True)
class AttentionConfig:
    kind: Literal["cem", "llama"]
    heads: Count
    steps: Count
    step_size: float
    learn_step_size: bool
    diagonal: Literal["none", "shared", "per_head"]
    diagonal_init: float
    diagonal_in_update: bool
    position: Literal["alibi", "rope", "none"]
    alibi_slopes: Literal["power_of_two", "press"]
    self_bias: bool
    rope_base: Annotated[float, Range(low=1)]
    tau: str
    preconditioner: PreconditionerKind
    preconditioner_rank: Count
    preconditioner_form: PreconditionerForm
    preconditioner_init: PreconditionerInit
    preconditioner_heads: Literal["per_head", "shared"]
    update: Update
    implementation: Literal["auto", "dense", "blockwise", "pallas"]
    block_sizes: tuple[Count, Count] | None
    remat_steps: bool


@dataclass(frozen=True)
class MLPConfig:
    kind: Literal["cem", "gated"]
    dim: Count
    steps: Count
    step_size: float
    learn_step_size: bool
    activation: Literal["silu", "gelu", "relu"]
    preconditioner: PreconditionerKind
    preconditioner_rank: Count
    preconditioner_form: PreconditionerForm
    preconditioner_init: PreconditionerInit
    update: Update
    remat_steps: bool


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: Annotated[int, Range(low=2, high=2**31 - 1)]  # token ids are int32
    dim: Count
    layers: Count
    residual: Literal["prenorm", "normalized"]
    step_norm: Literal["shared", "separate", "weightless", "none"]
    norm_gradient: Literal["at_u", "scaled", "full"]
    norm_eps: Annotated[float, Range(above=0, high=1)]
    init_std: Positive
    tie_embeddings: bool
    scan_layers: bool
    remat: Literal["none", "dots", "attention", "full"]
    attention: AttentionConfig
    mlp: MLPConfig

    @property
    def head_dim(self) -> int:
        """The head dimension R = D / K."""
        return self.dim // self.attention.heads

    @property
    def tau(self) -> float:
        """τ, the temperature of the attention's scores, as a number."""
        rules = {"sqrt_head_dim": math.sqrt(self.head_dim), "sqrt_model_dim": math.sqrt(self.dim)}
        tau = self.attention.tau
        return rules[tau] if tau in rules else float(tau)


def with_steps(
    model: ModelConfig, attention: int | None = None, mlp: int | None = None
) -> ModelConfig:
    """Return `model` with other numbers of steps T; None leaves a sublayer as it is.

    The parameters do not depend on T, so they stay valid.
    """
    return dataclasses.replace(
        model,
        attention=dataclasses.replace(model.attention, steps=attention or model.attention.steps),
        mlp=dataclasses.replace(model.mlp, steps=mlp or model.mlp.steps),
    )


@dataclass(frozen=True)
class DataConfig:
    path: str
    mixture: tuple[str, ...]
    context: Count
    separator: Literal["bos", "eos", "both"]
    document_mask: bool
    shuffle_seed: Seed
    prefetch: Annotated[int, Range(low=1, high=1024)]

    @property
    def weights(self) -> dict[str, float]:
        """The mixture as {directory: weight}; {path: 1} if only a path is set."""
        if not self.mixture:
            return {self.path: 1.0} if self.path else {}
        pairs = (entry.rpartition("=") for entry in self.mixture)
        return {directory: float(weight) for directory, _, weight in pairs}


@dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: Annotated[float, Range(above=0, high=10)]
    b1: Moment
    b2: Moment
    eps: Annotated[float, Range(above=0, high=1)]
    weight_decay: NonNegative
    decay_mask: Literal["matrices", "all"]
    clip_norm: Positive
    warmup_fraction: Fraction
    final_fraction: Fraction
    z_loss: NonNegative


@dataclass(frozen=True)
class TrainConfig:
    steps: Count | None
    tokens: Count | None
    global_batch: Count
    microbatch: Count | None
    compute_dtype: Literal["bfloat16", "float32", "float64"]
    max_bad_steps: Count
    stall_minutes: Positive

    @property
    def accumulation(self) -> int:
        """The number of microbatches whose gradients are summed per update."""
        return self.global_batch // (self.microbatch or self.global_batch)

    def total_steps(self, tokens_per_step: int, surplus: int = 0) -> int:
        """Return the number of updates of the whole run.

        `surplus`: tokens seen so far minus (steps so far × tokens per step now). Raises UserError
        when neither steps nor tokens are set.
        """
        if self.steps is not None:
            return self.steps
        if self.tokens is None:
            raise UserError("train.steps: set it, or train.tokens; both are None")
        return max(1, round((self.tokens - surplus) / tokens_per_step))


@dataclass(frozen=True)
class MeshConfig:
    data: Axis
    fsdp: Axis
    tensor: Axis
    context: Axis


@dataclass(frozen=True)
class CheckpointConfig:
    every: Count
    keep: Count
    keep_best: bool
    keep_every: Count | None
    every_minutes: Positive | None
    grace_seconds: Positive


@dataclass(frozen=True)
class EvalConfig:
    every: Count
    split: str
    batches: Count | None


@dataclass(frozen=True)
class LogConfig:
    every: Count
    energies_every: Annotated[int, Range(low=0)]
    profile_steps: tuple[Annotated[int, Range(low=0)], ...]
    tensorboard: bool
    compile_cache: str | None


@dataclass(frozen=True)
class Config:
    """A whole configuration. Construction checks it and raises UserError with every violation.

    NumPy and JAX scalars become Python scalars, even in a section made by `replace`.
    """

    seed: Seed
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    mesh: MeshConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    log: LogConfig

    def __post_init__(self):
        self._take(flattened(self))

    @property
    def tokens_per_step(self) -> int:
        """Targets per update: global batch times context."""
        return self.train.global_batch * self.data.context

    @property
    def total_steps(self) -> int:
        """The number of updates of the whole run. Raises UserError when it is not set."""
        return self.train.total_steps(self.tokens_per_step)

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values that JSON can hold; `from_dict` is its inverse."""
        return plain(self)

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
    ) -> "Config":
        """Check and build the configuration given by `values`, with `overrides` applied.

        Args:
          values: nested, or by dotted names.
          overrides: (dotted field, text as on the command line) pairs; a value that is not a
            string is taken as is. Later ones win. Setting `train.steps` unsets `train.tokens` and
            vice versa, and likewise for `data.path` and `data.mixture`.

        Raises:
          UserError: with every problem.
        """
        if not isinstance(values, Mapping):
            raise UserError(f"expected sections of fields, got {values!r}")
        given = flattened(values) | _parsed(overrides)
        absent = dict.fromkeys(_absent(name, given) for name in fields())
        problems = [unknown(name, fields()) for name in given if name not in fields()]
        problems += [f"{name}: missing" for name in absent if name]
        config = object.__new__(cls)
        config._take({name: given[name] for name in fields() if name in given}, problems)
        return config

    def _take(self, values: Mapping[str, Any], others: Sequence[str] = ()) -> None:
        """Check the values of dotted fields and build the sections from them.

        A ValueError in place of a value is the reason why it is invalid. Raises UserError with
        every problem, including the `others` found before, such as missing fields.
        """
        clean, problems = {}, []
        for name, value in values.items():
            try:
                if isinstance(value, ValueError):
                    raise value
                clean[name] = coerce(value, fields()[name])
            except ValueError as error:
                problems.append(f"{name}: {error}")
        sound = SimpleNamespace(**_arguments(Config, clean, SimpleNamespace))
        problems += [*others, *violations(sound, partial=len(clean) < len(fields()))]
        if problems:
            raise UserError(*problems)
        for name, value in _arguments(Config, clean).items():
            object.__setattr__(self, name, value)


def load_config(path: str, overrides: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()) -> Config:
    """Load the configuration in `file.py` or `file.py:argument`, with `overrides` applied.

    `overrides` are as in `Config.from_dict`. Raises UserError with every problem.
    """
    return Config.from_dict(read_config_file(path), overrides)


def differences(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Return the dotted fields that differ, each with its values in `a` and `b`."""
    left, right = leaves(a), leaves(b)
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}


def leaves(config: Config) -> dict[str, Any]:
    """Return every field's value, as JSON can hold it, by dotted name."""
    return flattened(config.to_dict())


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values in nested mappings or sections by dotted name."""
    found = {}
    for name, value in (values if isinstance(values, Mapping) else vars(values)).items():
        if dataclasses.is_dataclass(value) or (isinstance(value, Mapping) and value):
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


@functools.cache
def fields() -> dict[str, Any]:
    """Return every leaf of the configuration: dotted name to annotated type."""
    return dict(_declared(Config))


def _declared(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in _hints(section).items():
        if dataclasses.is_dataclass(kind):
            yield from _declared(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def _absent(field: str, given: Mapping[str, Any]) -> str | None:
    """Return the field, or the outermost section around it, if nothing of it is given."""
    for name in itertools.accumulate(field.split("."), "{}.{}".format):
        if name in given:  # or some other value is given in place of a section
            return None
        if not any(other.startswith(f"{name}.") for other in given):
            return name
    return None


def _arguments(
    section: type, values: Mapping[str, Any], make: type | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Return the constructor arguments of a section, as far as the dotted `values` have them.

    `make` replaces the classes of its subsections.
    """
    found = {}
    for name, kind in _hints(section).items():
        dotted = prefix + name
        if dataclasses.is_dataclass(kind):
            found[name] = (make or kind)(**_arguments(kind, values, make, f"{dotted}."))
        elif dotted in values:
            found[name] = values[dotted]
    return found


def _parsed(overrides: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values of the overridden fields and of the alternatives that they unset.

    A ValueError in place of a value is the reason why it is invalid.
    """
    given: dict[str, Any] = {}
    for name, value in overrides.items() if isinstance(overrides, Mapping) else overrides:
        if isinstance(value, str) and name in fields():
            try:
                value = parse(value, fields()[name])
            except ValueError as error:
                value = error
        given[name] = value
    for pair in _ALTERNATIVES:
        for one, other in (pair, pair[::-1]):
            if given.get(one) and other not in given:
                given[other] = _UNSET[other]
    return given

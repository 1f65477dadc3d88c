"""The configuration as frozen, validated dataclasses; `configs/base.py` says what each field means.

A configuration comes from a Python file whose `get_config()` returns a ConfigDict (`load_config`)
or from JSON (`Config.from_dict`). Both report every violation at once, in one `UserError`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

from cem_jax.config.file import read_config_file
from cem_jax.config.names import unknown
from cem_jax.config.rules import UnknownField, violations
from cem_jax.config.values import Range, coerce, parse
from cem_jax.errors import UserError

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

# Pairs of which one field at most is set: setting one by an override unsets the other.
_ALTERNATIVES = (("train.steps", "train.tokens"), ("data.path", "data.mixture"))


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

    def tau_value(self, dim: int) -> float:
        """τ, the temperature of the logits, for a model of width `dim`."""
        rules = {"sqrt_head_dim": math.sqrt(dim / self.heads), "sqrt_model_dim": math.sqrt(dim)}
        return rules[self.tau] if self.tau in rules else float(self.tau)


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
        """R = D / K."""
        return self.dim // self.attention.heads

    @property
    def tau(self) -> float:
        """τ of the attention, as a number."""
        return self.attention.tau_value(self.dim)


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
        """The mixture as {directory: weight}; {path: 1} when there is only a path."""
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
        """Microbatches whose gradients are summed for one update."""
        return self.global_batch // (self.microbatch or self.global_batch)

    def total_steps(self, tokens_per_step: int, surplus: int = 0) -> int:
        """As of `Config`; `surplus`: tokens seen beyond those of as many steps as they are now."""
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

    NumPy's and JAX's scalars become Python's, also those in a section that `replace` made.
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
        problems: list[str] = []
        clean = _clean(Config, _plain(self), "", problems)
        problems += violations(_Partial(clean))
        if problems:
            raise UserError(*problems)
        for name, annotation in get_type_hints(Config, include_extras=True).items():
            value = clean[name]
            section = _build(annotation, value) if isinstance(value, dict) else value
            object.__setattr__(self, name, section)

    @property
    def tokens_per_step(self) -> int:
        """Targets of one update: global batch times context."""
        return self.train.global_batch * self.data.context

    @property
    def total_steps(self) -> int:
        """Updates of the whole run. Raises UserError when the config does not say how long."""
        return self.train.total_steps(self.tokens_per_step)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values that JSON can hold; `from_dict` is its inverse."""
        return _plain(self)

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
    ) -> "Config":
        """Check and build the configuration of nested `values`, fields replaced by `overrides`.

        Overrides are (dotted field, text as on the command line) pairs; a value that is no string
        is taken as it is. Later ones win. Setting `train.steps` unsets `train.tokens` and the other
        way round, and the same for `data.path` and `data.mixture`. Raises UserError with every
        problem.
        """
        if not isinstance(values, Mapping):
            raise UserError(f"expected sections of fields, got {values!r}")
        problems: list[str] = []
        for name, value in _parsed(overrides, problems).items():
            values = _replaced(values, name, value)
        return _checked(values, problems)


def load_config(path: str, overrides: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()) -> Config:
    """Load the configuration of `file.py` or `file.py:argument`, with `overrides`.

    Raises UserError with every problem; overrides are those of `Config.from_dict`.
    """
    return Config.from_dict(read_config_file(path), overrides)


def differences(a: Config, b: Config) -> list[str]:
    """`field: value in a -> value in b` for every field that differs."""
    left, right = leaves(a), leaves(b)
    return [
        f"{name}: {left[name]!r} -> {right[name]!r}" for name in left if left[name] != right[name]
    ]


def leaves(config: Config) -> dict[str, Any]:
    """Every value of `config`, by its dotted name."""
    return flattened(config.to_dict())


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values by their dotted names."""
    flat = {}
    for name, value in values.items():
        inner = flattened(value) if isinstance(value, Mapping) else {None: value}
        flat |= {f"{name}.{deeper}" if deeper else name: leaf for deeper, leaf in inner.items()}
    return flat


@functools.cache
def fields() -> dict[str, Any]:
    """Every leaf of the configuration: dotted name to annotated type."""
    return dict(_declared(Config, ""))


def _declared(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, annotation in get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(annotation):
            yield from _declared(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, annotation


_FAULTY = object()  # stands for a value that was already reported as wrong
_MISSING = object()
_UNSET = {"train.steps": None, "train.tokens": None, "data.path": "", "data.mixture": ()}


class _Partial:
    """A view of nested values for the rules, where a faulty or missing field is unknown."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        value = self._values.get(name, _FAULTY)
        if value is _FAULTY:
            raise UnknownField(name)
        return _Partial(value) if isinstance(value, Mapping) else value


def _parsed(
    overrides: Mapping[str, Any] | Sequence[tuple[str, Any]], problems: list[str]
) -> dict[str, Any]:
    """Values of the overridden fields and of the alternatives that they unset."""
    given = {}
    for name, value in overrides.items() if isinstance(overrides, Mapping) else overrides:
        try:
            given[name] = _override(name, value)
        except ValueError as error:
            problems.append(str(error))
            given[name] = _FAULTY
    given = {name: value for name, value in given.items() if name in fields()}
    for group in _ALTERNATIVES:
        chosen = [name for name in group if given.get(name)]
        if len(chosen) == 1:
            (other,) = set(group) - set(chosen)
            given.setdefault(other, _UNSET[other])
    return given


def _override(name: str, value: Any) -> Any:
    if not isinstance(name, str):
        raise ValueError(f"{name!r}: a field is named by text")
    annotation = fields().get(name)
    if annotation is None:
        raise ValueError(unknown(name, fields()))
    try:
        return parse(value, annotation) if isinstance(value, str) else coerce(value, annotation)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _replaced(values: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """`values` with that of the dotted field replaced, or added."""
    section, _, inner = name.partition(".")
    if not inner:
        return {**values, section: value}
    old = values.get(section)
    return {**values, section: _replaced(old if isinstance(old, Mapping) else {}, inner, value)}


def _checked(values: Mapping[str, Any], problems: list[str]) -> Config:
    problems = list(problems)
    clean = _clean(Config, values, "", problems)
    problems += violations(_Partial(clean))
    if problems:
        raise UserError(*problems)
    return _build(Config, clean)


def _clean(cls: type, values: Mapping[str, Any], prefix: str, problems: list[str]) -> dict:
    """`values` with every leaf of its field's type; what is wrong goes to `problems`."""
    hints = get_type_hints(cls, include_extras=True)
    problems += [unknown(prefix + name, fields()) for name in values if name not in hints]
    clean: dict[str, Any] = {}
    for name, annotation in hints.items():
        value = values.get(name, _MISSING)
        if value is _FAULTY:
            continue
        if value is _MISSING:
            problems.append(f"{prefix}{name}: missing")
        elif not dataclasses.is_dataclass(annotation):
            try:
                clean[name] = coerce(value, annotation)
            except ValueError as error:
                problems.append(f"{prefix}{name}: {error}")
        elif isinstance(value, Mapping):
            clean[name] = _clean(annotation, value, f"{prefix}{name}.", problems)
        else:
            problems.append(f"{prefix}{name}: expected a section of fields, got {value!r}")
    return clean


def _build(cls: type, clean: Mapping[str, Any]) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    return cls(
        **{n: _build(hints[n], v) if isinstance(v, Mapping) else v for n, v in clean.items()}
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value

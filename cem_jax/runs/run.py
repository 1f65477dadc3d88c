"""An existing run directory, read by the commands that use what was trained."""

import os
from dataclasses import dataclass, replace

from etils import epath

from cem_jax.config import Config
from cem_jax.config.values import coerce
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.checkpoint import Checkpointer
from cem_jax.runs.directory import read_config
from cem_jax.runs.jax_settings import configure_jax
from cem_jax.storage.paths import place


def _anywhere(config: Config) -> Config:
    """A run that demanded its accelerator's fused attention is evaluated on any machine."""
    attention = config.model.attention
    if attention.implementation != "pallas":
        return config
    attention = replace(attention, implementation="auto", block_sizes=None)
    return replace(config, model=replace(config.model, attention=attention))


@dataclass(frozen=True)
class Run:
    """A run: its configuration, tokenizer and checkpoints. Nothing here writes to it."""

    workdir: epath.Path
    config: Config

    @classmethod
    def open(cls, workdir: str | os.PathLike[str]) -> "Run":
        """The run in `workdir`. Raises UserError when it holds none, or a broken config.json.

        Configures JAX as the run does: float64, compile cache.
        """
        path = place(workdir)
        if not path.is_dir():
            raise UserError(f"run directory {path} does not exist: `cem train` makes one")
        config = read_config(path)
        if config is None:
            names = sorted(entry.name for entry in path.iterdir())
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise UserError(
                f"{path} holds no run: it has no config.json, only {shown or 'nothing at all'}"
            )
        configure_jax(config)
        return cls(path, _anywhere(config))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the run was trained with.

        Raises UserError when tokenizer.model is missing or does not fit the model.
        """
        path = self.workdir / "tokenizer.model"
        try:
            tokenizer = Tokenizer(path.read_bytes(), name=str(path))
        except OSError as error:
            reason = error.strerror or "it is not there"
            raise UserError(f"tokenizer {path} cannot be read: {reason}") from None
        if tokenizer.vocab_size > self.config.model.vocab_size:
            raise UserError(
                f"{tokenizer.name} has {tokenizer.vocab_size} pieces, more than model.vocab_size = "
                f"{self.config.model.vocab_size}: it is not the tokenizer this run was trained with"
            )
        return tokenizer

    def parameters(self, step: int | None = None) -> tuple[pure.Parameters, int]:
        """(parameters, step) of a checkpoint, the newest for None, on the first device.

        Raises UserError when `step` is no integer, there is no such checkpoint, it is damaged or
        another model's, or tokenizer.model is not the tokenizer it was trained with.
        """
        try:
            step = coerce(step, int | None)
        except ValueError as error:
            raise UserError(f"step: {error}") from None
        abstract = {"params": pure.abstract_parameters(self.config.model)}
        with Checkpointer(self.workdir / "checkpoints", keep=1, keep_best=False) as checkpoints:
            state, extra, step = checkpoints.restore(step, abstract, partial=True)
        trained_with, present = extra.get("tokenizer_hash"), self.tokenizer().hash
        if trained_with not in (None, present):
            raise UserError(
                f"checkpoint {step} of {self.workdir} was trained with tokenizer {trained_with}, "
                f"but {self.workdir / 'tokenizer.model'} is {present}: put the right one back"
            )
        return state["params"], step

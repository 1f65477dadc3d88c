"""A trained model, read from a run directory."""

import os
from dataclasses import dataclass, replace

from cem_jax.config import Config
from cem_jax.config.values import coerce
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.checkpoints import Info, Reader, warn
from cem_jax.runs.directory import read_config
from cem_jax.runs.resume import as_recorded, edited_config
from cem_jax.runs.setup import configure_jax
from cem_jax.storage.paths import AnyPath, place


@dataclass(frozen=True)
class Run:
    """A run's checkpoint, read only: configuration, tokenizer and parameters.

    trained: the configuration that the checkpoint recorded; fields that change no result, and the
      data's location, are from config.json.
    parameters: on the first device.
    """

    workdir: AnyPath
    trained: Config
    tokenizer: Tokenizer
    step: int
    parameters: pure.Parameters

    @classmethod
    def open(cls, workdir: str | os.PathLike[str], step: int | None = None) -> "Run":
        """Open checkpoint `step` (None: the newest) of the run in `workdir`.

        Configures JAX as the run does: float64, compile cache. Warns if config.json is not what the
        checkpoint was trained with; the checkpoint's own model is opened.

        Raises UserError if there is no run or no such checkpoint, config.json is broken, the
        checkpoint is damaged, `step` is not an integer, or tokenizer.model is not the run's.
        """
        path = place(workdir)
        present = _config_of(path)
        try:
            step = coerce(step, int | None)
        except ValueError as error:
            raise UserError(f"step: {error}") from None
        configure_jax(present)
        recorded = lambda info: as_recorded(present, info.position)
        wanted = lambda info: {"params": pure.abstract_parameters(recorded(info).model)}
        state, info = Reader(path / "checkpoints").restore(step, wanted, partial=True)
        trained = recorded(info)
        if edited := edited_config(path, present, info.position):
            warn(edited)
        return cls(path, trained, _tokenizer_of(path, trained, info), info.step, state["params"])

    @property
    def config(self) -> Config:
        """`trained`, but with implementation "auto" if it was "pallas", to run on any device."""
        attention = self.trained.model.attention
        if attention.implementation != "pallas":
            return self.trained
        attention = replace(attention, implementation="auto", block_sizes=None)
        return replace(self.trained, model=replace(self.trained.model, attention=attention))


def _config_of(path: AnyPath) -> Config:
    if not path.is_dir():
        raise UserError(f"run directory {path} does not exist: `cem train` creates one")
    config = read_config(path)
    if config is None:
        names = sorted(entry.name for entry in path.iterdir())
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        raise UserError(f"{path} holds no run: it has no config.json, only {shown or 'nothing'}")
    return config


def _tokenizer_of(workdir: AnyPath, config: Config, info: Info) -> Tokenizer:
    path = workdir / "tokenizer.model"
    try:
        tokenizer = Tokenizer(path.read_bytes(), name=str(path))
    except OSError as error:
        reason = error.strerror or "it does not exist"
        raise UserError(f"tokenizer {path} cannot be read: {reason}") from None
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"{tokenizer.name} has {tokenizer.vocab_size} pieces, more than model.vocab_size = "
            f"{config.model.vocab_size}: it is not the tokenizer this run was trained with"
        )
    if info.position.tokenizer_hash not in (None, tokenizer.hash):
        raise UserError(
            f"checkpoint {info.step} of {workdir} was trained with tokenizer "
            f"{info.position.tokenizer_hash}, but {path} is {tokenizer.hash}: put the right one "
            "back"
        )
    return tokenizer

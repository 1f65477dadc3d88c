"""The position of a run, which its checkpoints record beside the arrays.

Resuming, evaluating and exporting rely on this record; `config.json` and the command line are
compared with it (`resume`).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Position:
    """The state of a run outside its arrays; each field is stored under its own name.

    Args:
      step: number of updates done.
      tokens: target tokens seen, over all batch sizes; None: not recorded.
      windows_consumed: number of the next window to train on, in windows of `context` tokens.
      loss: of the last step; None if there was none or it was not finite.
      owes_validation: whether the run stopped before the validation due at `step`.
      initialised_from: the run it took its parameters from; None: fresh ones; "": not recorded.
      imported: whether `cem import` made the checkpoint, which then has no optimizer state.
      config: the configuration as plain nested values; empty: not recorded.
      dataset: the fingerprint of the training data.
      tokenizer_hash, separator: those of the data; None: not recorded.
      tokenizer: the SentencePiece model, in base 64.
    """

    step: int
    tokens: int | None = None
    windows_consumed: int = 0
    loss: float | None = None
    owes_validation: bool = False
    initialised_from: str | None = ""
    imported: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    dataset: str | None = None
    tokenizer_hash: str | None = None
    separator: str | None = None
    tokenizer: str | None = None

    @property
    def context(self) -> int:
        """Tokens per window of `windows_consumed`."""
        return self.config["data"]["context"]

    @classmethod
    def parse(cls, step: int, stored: Mapping[str, Any]) -> "Position":
        """Return the position stored with checkpoint `step`; missing fields take their defaults."""
        names = {f.name for f in dataclasses.fields(cls)} & stored.keys()
        return cls(**{"step": step} | {name: stored[name] for name in names})

    def stored(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; the inverse of `parse`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.initialised_from == "":
            del values["initialised_from"]
        return values

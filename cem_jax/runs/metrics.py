"""A run's metrics: `metrics.jsonl`, one JSON object per line, and TensorBoard events.

Every line has `step` and `kind` (train | eval | energies | event; see docs/metrics.md). A run that
resumes at step s drops the lines of later steps, so each step appears once however often the run
was killed. NaN and infinities become null, so that lines are valid JSON.
"""

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from cem_jax.errors import UserError
from cem_jax.runs.tensorboard import Board
from cem_jax.storage.append import growing
from cem_jax.storage.durable import write_durably
from cem_jax.storage.paths import AnyPath, place, writing
from cem_jax.text import plain

FILE_NAME = "metrics.jsonl"
KINDS = ("train", "eval", "energies", "event")


class MetricsWriter:
    """Appends to the metrics of the run in `workdir`. At most one process of a run has a writer.

    Args:
      workdir: the run directory; created if missing.
      tensorboard: whether to write TensorBoard events into `<workdir>/tensorboard` as well.
      resume_step: the step of the restored checkpoint; lines of later steps are removed.
        0: a new run; all lines are removed.
      due: kinds whose lines of `resume_step` are removed too, to be written again.

    Raises:
      UserError: the existing `metrics.jsonl` has an invalid line, or may not be written.
      RunFailed: writing fails, now or later.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        tensorboard: bool,
        resume_step: int,
        due: Collection[str] = (),
    ):
        folder = place(workdir)
        self.path = folder / FILE_NAME
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
        kept = _rewind(self.path, resume_step, due)
        self._file = growing(self.path, _encoded(kept))
        self._board = Board(folder / "tensorboard", resume_step) if tensorboard else None
        for line in kept:
            if line["step"] == resume_step:  # TensorBoard drops whole steps
                self._show(line)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line, unbuffered.

        Args:
          kind: one of `KINDS`.
          step: updates done so far.
          values: numbers (0-d arrays too), strings, None, or lists and dicts of them.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, not {kind!r}")
        line = {"step": int(step), "kind": kind} | {k: plain(v) for k, v in values.items()}
        self._file.write(_encoded([line]))
        self._show(line)

    def _show(self, line: Mapping[str, Any]) -> None:
        if self._board is not None:
            group = "/".join([line["kind"], *(line[n] for n in ("split", "field") if n in line)])
            named = {f"{group}/{name}": value for name, value in _scalars(line) if name != "step"}
            self._board.add(line["step"], named)

    def sync(self) -> None:
        """Return once everything written is durable; call this before a save."""
        self._file.sync()

    def close(self) -> None:
        """Close the files; may be called repeatedly."""
        self._file.close()
        if self._board is not None:
            self._board.close()


class SilentMetrics(contextlib.AbstractContextManager):
    """Replaces a MetricsWriter in processes that write nothing."""

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the lines of `path` (a `metrics.jsonl` or a run directory) as dicts, in order.

    An unfinished last line, from a run killed while writing it, is left out.

    Raises:
      UserError: the file is missing, or has an invalid line (the message gives its number).
    """
    file = place(path)
    file = file / FILE_NAME if file.is_dir() else file
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    lines = content.split(b"\n")[:-1]  # an unfinished line has no newline
    return [_parse(file, number, line) for number, line in enumerate(lines, 1)]


def metrics_so_far(workdir: AnyPath) -> list[dict[str, Any]]:
    """Read the metrics of a run directory; return [] if it has none yet."""
    return read_metrics(workdir) if (workdir / FILE_NAME).exists() else []


def _parse(file: AnyPath, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and type(record["step"]) is int and record["kind"] in KINDS:
            return record
    except (ValueError, KeyError, RecursionError):
        pass
    raise UserError(f"{file}, line {number}: not a metrics line (an object with step and kind)")


def _rewind(path: AnyPath, step: int, due: Collection[str]) -> list[dict[str, Any]]:
    """Cut the file to the lines up to `step`, atomically, and return them."""
    if not path.exists():
        return []
    lines = read_metrics(path.parent) if step > 0 else []
    kept = [
        line
        for line in lines
        if line["step"] < step or (line["step"] == step and line["kind"] not in due)
    ]
    with writing(path):
        write_durably(path, _encoded(kept))
    return kept


def _encoded(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number); nested dicts give outer/inner names."""
    for name, value in values.items():
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _scalars(value))

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
from cem_jax.runs.checkpoints import warn
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
      UserError: the existing `metrics.jsonl` may not be read or written.
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
        board = folder / "tensorboard"
        if tensorboard and board.exists() and not board.is_dir():
            warn(f"{board}: is a file, not a directory; no TensorBoard events are written")
            tensorboard = False
        self._board = Board(board, resume_step) if tensorboard else None
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

    An unfinished last line, from a run killed while writing it, is left out; so are invalid lines,
    with a warning that gives their numbers.

    Raises:
      UserError: the file cannot be read.
    """
    file = place(path)
    file = file / FILE_NAME if file.is_dir() else file
    records, bad = _read(file)
    if bad:
        warn(f"{file}: {_named(bad)} left out")
    return records


def metrics_so_far(workdir: AnyPath) -> list[dict[str, Any]]:
    """Read the metrics of a run directory; return [] if it has none yet."""
    file = workdir / FILE_NAME
    return _read(file)[0] if file.exists() else []


def _read(file: AnyPath) -> tuple[list[dict[str, Any]], dict[int, bytes]]:
    """Return the records, and the invalid lines by their numbers."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    lines = content.split(b"\n")[:-1]  # an unfinished line has no newline
    parsed = {number: _parse(line) for number, line in enumerate(lines, 1)}
    bad = {number: lines[number - 1] for number, record in parsed.items() if record is None}
    return [record for record in parsed.values() if record is not None], bad


def _named(bad: Collection[int]) -> str:
    shown = ", ".join(map(str, list(bad)[:8])) + (", …" if len(bad) > 8 else "")
    problem = "is not a metrics line" if len(bad) == 1 else "are not metrics lines"
    lines = "line" if len(bad) == 1 else "lines"
    return f"{lines} {shown} {problem} (an object with step and kind),"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=_refuse)  # NaN could not be written again
        if isinstance(record, dict) and type(record["step"]) is int and record["kind"] in KINDS:
            return record
    except (ValueError, KeyError, RecursionError):
        pass
    return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _rewind(path: AnyPath, step: int, due: Collection[str]) -> list[dict[str, Any]]:
    """Cut the file to the lines up to `step`, atomically, and return them.

    Invalid lines go to a file beside it: they must not keep a sound checkpoint from resuming.
    """
    if not path.exists():
        return []
    lines, bad = _read(path) if step > 0 else ([], {})
    if bad:
        aside = path.with_name(path.name + ".invalid")
        before = aside.read_bytes() if aside.exists() else b""
        with writing(aside):
            write_durably(aside, before + b"".join(line + b"\n" for line in bad.values()))
        warn(f"{path}: {_named(bad)} moved to {aside.name}")
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

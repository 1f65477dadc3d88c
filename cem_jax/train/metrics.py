"""The record of a run: `metrics.jsonl`, one JSON object a line, and TensorBoard beside it.

Every line has `step` and `kind` (train | eval | energies | event; docs/metrics.md says more). A run
that resumes at step s drops what was written about later steps, so that each step stands once
however often the run was killed.
NaN and infinities become null: a line is valid JSON for every reader.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from etils import epath

from cem_jax.data.remote import is_url
from cem_jax.errors import UserError
from cem_jax.train.places import place, write_whole, writing

FILE_NAME = "metrics.jsonl"
KINDS = ("train", "eval", "energies", "event")


class MetricsWriter:
    """Appends to the record of the run in `workdir`. One process of a run may hold one.

    Args:
      workdir: the run directory; made if it is missing.
      tensorboard: whether to write TensorBoard events into `<workdir>/tensorboard` as well.
      resume_step: the step of the restored checkpoint; lines about later steps are removed.
        0: a run from the start, nothing is kept.

    Raises:
      UserError: the existing `metrics.jsonl` holds a line that is no metrics line, or may not be
        written.
      RunFailed: it cannot be written, now or later.
    """

    def __init__(self, workdir: str | os.PathLike, *, tensorboard: bool, resume_step: int):
        folder = place(workdir)
        self.path = folder / FILE_NAME
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
        kept = _rewind(self.path, resume_step)
        with writing(self.path):
            self._file = _Rewritten(self.path, kept) if is_url(self.path) else _Appended(self.path)
        self._boards = folder / "tensorboard"
        self._board = _open_board(self._boards, resume_step) if tensorboard else None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line and hand it to the operating system.

        Args:
          kind: one of `KINDS`.
          step: updates done so far.
          values: numbers (0-d arrays too), strings, None, or lists and dicts of them.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, not {kind!r}")
        line = {"step": int(step), "kind": kind} | {k: _plain(v) for k, v in values.items()}
        with writing(self.path):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._board is not None:
            group = f"{kind}/{line['split']}" if "split" in line else kind
            for name, value in _scalars(line):
                if name != "step":
                    self._board.add_scalar(f"{group}/{name}", value, step)
            if kind != "train":
                with writing(self._boards):
                    self._board.flush()

    def sync(self) -> None:
        """Returns when what was written is kept, come what may; to be called before a save."""
        with writing(self.path):
            self._file.sync()

    def close(self) -> None:
        """Close the files; more than once does no harm."""
        with writing(self.path):
            self._file.close()
        board, self._board = self._board, None
        if board is not None:
            with writing(self._boards):
                board.close()


class SilentMetrics(contextlib.AbstractContextManager):
    """Stands in for a MetricsWriter in the processes that write nothing."""

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Nothing is written."""

    def sync(self) -> None:
        """There is nothing to keep."""


class _Appended:
    """A file whose lines are with the operating system as soon as they are written."""

    def __init__(self, path: epath.Path):
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (held until close)

    def write(self, text: str) -> None:
        content = text.encode()
        while content:  # a disk that is nearly full takes a part, and says so the next time
            content = content[self._file.write(content) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _Rewritten:
    """A text in an object store, which cannot append: written anew, whole, now and then."""

    def __init__(self, path: epath.Path, text: str):
        self._path, self._text, self._uploaded = path, text, text
        self._due = 0.0

    def write(self, text: str) -> None:
        """Uploaded if the last time is long enough ago: it should take 1 % of the time at most."""
        self._text += text
        if time.monotonic() >= self._due:
            self.sync()

    def sync(self) -> None:
        if self._text == self._uploaded:
            return
        began = time.monotonic()
        self._path.write_text(self._text)
        self._uploaded = self._text
        now = time.monotonic()
        self._due = now + max(30.0, 100 * (now - began))

    def close(self) -> None:
        self.sync()


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of `path` (a `metrics.jsonl` or a run directory) as dicts, in order.

    A last line without its end, left by a run killed while writing it, is left out.

    Raises:
      UserError: the file is missing, or a line is no metrics line (named by its number).
    """
    file = place(path)
    file = file / FILE_NAME if file.is_dir() else file
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    lines = content.split(b"\n")[:-1]  # what follows the last newline was never finished
    return [_parse(file, number, line) for number, line in enumerate(lines, 1)]


def _parse(file: epath.Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and type(record["step"]) is int and record["kind"] in KINDS:
            return record
    except (ValueError, KeyError):
        pass
    raise UserError(f"{file}, line {number}: not a metrics line (an object with step and kind)")


def _rewind(path: epath.Path, step: int) -> str:
    """Keep the whole lines up to `step`, and return them; all or nothing, even if killed here."""
    if not path.exists():
        return ""
    lines = [line for line in read_metrics(path) if line["step"] <= step] if step > 0 else []
    kept = "".join(json.dumps(line) + "\n" for line in lines)
    write_whole(path, kept.encode())
    return kept


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers by name, those within dicts as outer/inner."""
    for name, value in values.items():
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _scalars(value))


def _plain(value: Any) -> Any:
    """`value` as what JSON can hold; NaN and infinities as None."""
    if hasattr(value, "item"):  # a 0-d array or NumPy scalar
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"a metric must be numbers or text, not {type(value).__name__}")


def _open_board(folder: epath.Path, resume_step: int) -> Any:
    from tensorboardX import SummaryWriter  # slow to import, and often not wanted

    with writing(folder):
        # A queue without end: a full disk ends its thread, and adding to a full queue waits.
        return SummaryWriter(str(folder), purge_step=resume_step + 1, max_queue=0)

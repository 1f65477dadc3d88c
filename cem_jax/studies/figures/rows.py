"""The row of a finished run: its configuration, cost and result, in one small JSON file.

A sweep's directory holds it as <run>/row.json; `--results DIR` keeps a copy as DIR/<run>.json, and
a run that already has a row there is not run again. `cem report` reads both.
"""

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from numbers import Real
from typing import Any, get_type_hints

import jax

from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.evaluation import evaluate
from cem_jax.runs.metrics import read_metrics
from cem_jax.storage.durable import write_durably
from cem_jax.storage.paths import AnyPath, writing
from cem_jax.studies.figures.grid import Run
from cem_jax.train.flops import training_flops_per_token

FORMAT = "cem_jax row 1"
SPLIT = "test"
_MEASURED = ("loss", "perplexity", "loss_at_steps")


@dataclass(frozen=True)
class Row:
    """The record of one finished run.

    Attributes:
      run: its name.
      key: shared by runs that differ only in their seeds.
      seconds: duration of all training steps; None where too few were measured.
      loss: on `split`, in nats, as `perplexity`; NaN where the run diverged.
      loss_at_steps: T at evaluation, as text -> loss.
      dataset: its fingerprint.
      config: all fields except those particular to a machine.
    """

    run: str
    key: str
    size: str
    learning_rate: Real
    seed: Real
    parameters: Real
    training_flops: Real
    tokens: Real
    steps: Real
    seconds: Real | None
    split: str
    loss: Real
    perplexity: Real
    bits_per_byte: Real | None
    loss_at_steps: Mapping
    dataset: str
    device: str
    versions: Mapping
    config: Mapping

    def write(self, file: AnyPath) -> None:
        """Write the row as a JSON file, whole or not at all."""
        write_json(file, {"format": FORMAT} | dataclasses.asdict(self))


_FIELDS = get_type_hints(Row)


def measure(run: Run, workdir: AnyPath, dataset: str) -> Row:
    """Measure the run trained in `workdir` on the test split.

    Uses its last validation if that was on the test split; otherwise evaluates it here.
    """
    lines = read_metrics(workdir)
    config = run.config
    tokens = config.total_steps * config.tokens_per_step
    result = _last_validation(lines, config.total_steps) or evaluate(workdir, split=SPLIT)
    return Row(
        run=run.name,
        key=run.key,
        size=run.size,
        learning_rate=config.optimizer.learning_rate,
        seed=run.seed,
        parameters=pure.count(config.model),
        training_flops=training_flops(run),
        tokens=tokens,
        steps=config.total_steps,
        seconds=training_seconds(lines),
        split=SPLIT,
        **{name: result[name] for name in ("loss", "perplexity", "bits_per_byte")},
        loss_at_steps={str(t): _loss_at(workdir, t) for t in run.evaluate_steps},
        dataset=dataset,
        device=(
            f"{jax.device_count()} × {jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores"
        ),
        versions={name: version(name) for name in ("cem_jax", "jax")},
        config=_without_places(config.to_dict()),
    )


def training_flops(run: Run) -> float:
    """Return the FLOPs of the run's training."""
    config = run.config
    tokens = config.total_steps * config.tokens_per_step
    return tokens * training_flops_per_token(config.model, config.data.context)


def training_seconds(lines: list[dict[str, Any]]) -> float | None:
    """Return the seconds of all steps without compilation and pauses; None if too few exist."""
    train = [line for line in lines if line["kind"] == "train"]
    known = [line["step_seconds"] for line in train if line["step_seconds"] is not None]
    if not known:
        return None
    total, before, seconds = 0.0, 0, known[0]
    for line in train:
        seconds = line["step_seconds"] if line["step_seconds"] is not None else seconds
        total += seconds * (line["step"] - before)
        before = line["step"]
    return total


def read_rows(folder: AnyPath) -> dict[str, Row]:
    """Read the rows in `folder` and its subfolders, by the runs' names.

    A null loss or perplexity, as of a run that diverged, becomes NaN. Raises UserError for a file
    that is not JSON or lacks a row's fields; JSON files that hold no row are skipped.
    """
    rows, problems = {}, []
    for file in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        try:
            values = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{file}: cannot be read as JSON: {error}")
            continue
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            continue
        values = {name: values.get(name) for name in _FIELDS}
        values |= {name: _finite_or_nan(values[name]) for name in _MEASURED}
        wrong = [name for name, kind in _FIELDS.items() if not isinstance(values[name], kind)]
        if wrong:
            problems.append(f"{file}: a row without, or of another kind: {', '.join(wrong)}")
        else:
            rows[values["run"]] = Row(**values)
    if problems:
        raise UserError(*problems)
    return rows


def _finite_or_nan(value: Any) -> Any:
    """Return a measurement, or several by name, with NaN where JSON has null."""
    if isinstance(value, Mapping):
        return {name: _finite_or_nan(one) for name, one in value.items()}
    return math.nan if value is None else value


def write_json(path: AnyPath, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    _write(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_csv(path: AnyPath, table: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV table with the first line's fields as columns, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    _write(path, text.getvalue())


def _write(path: AnyPath, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        write_durably(path, text.encode())


def _without_places(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's dict without machine-specific fields, so that it can be shared."""
    values["data"] |= {"path": "", "mixture": []}
    values["log"]["compile_cache"] = None
    return values


def _last_validation(lines: list[dict[str, Any]], step: int) -> dict[str, Any] | None:
    found = [line for line in lines if line["kind"] == "eval" and line["step"] == step]
    return next((line for line in found if line["split"] == SPLIT), None)


def _loss_at(workdir: AnyPath, steps: int) -> float:
    return evaluate(workdir, split=SPLIT, attention_steps=steps, mlp_steps=steps)["loss"]

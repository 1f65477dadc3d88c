"""Train the runs of figures one after another, or print their commands for a job array.

A run's directory is WORKDIR/<run>. Finished runs are skipped, broken ones resumed; one that fails
is reported and the others continue. WORKDIR/table.json and table.csv hold the state of all runs.
"""

import functools
import gc
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import jax

from cem_jax.config import leaves, load_config
from cem_jax.errors import RunFailed, UserError
from cem_jax.runs.setup import open_data
from cem_jax.runs.training import train
from cem_jax.storage.paths import AnyPath, place
from cem_jax.studies.figures.grid import Run, flag
from cem_jax.studies.figures.rows import (
    SPLIT,
    Row,
    measure,
    read_rows,
    training_flops,
    write_csv,
    write_json,
)
from cem_jax.text import format_duration

_MEASURED = (
    "parameters",
    "training_flops",
    "tokens",
    "seconds",
    "loss",
    "perplexity",
    "bits_per_byte",
)


def sweep(runs: Sequence[Run], workdir: str, results: str | None = None) -> dict[str, Any]:
    """Train and measure all runs that are not finished.

    Args:
      workdir: holds one directory per run; a path or a URL, as `results`.
      results: also keeps a small JSON file per run; runs whose file is there are finished.

    Returns:
      {runs: the table, passed: whether no run failed}.

    Raises:
      UserError: before anything runs, for data that do not match.
    """
    grid = _Grid(runs, place(workdir), place(results) if results else None)
    grid.run()
    return {"passed": not grid.failed, "runs": grid.table()}


def commands(runs: Sequence[Run], workdir: str, results: str | None = None) -> list[str]:
    """Return the `cem train` command of each run that is not finished; arguments as in `sweep`."""
    done = _finished(runs, place(workdir), place(results) if results else None)
    return [command(run, workdir) for run in runs if run.name not in done]


def command(run: Run, workdir: str) -> str:
    """Return the `cem train` command that trains the run, for a shell."""
    folder = f"{workdir.rstrip('/')}/{run.name}"
    base = _leaves_of_file(run.file)
    flags = [flag(name, v) for name, v in leaves(run.config).items() if v != base[name]]
    file = os.path.relpath(run.file)
    return shlex.join(["cem", "train", "--config", file, "--workdir", folder, *flags])


@functools.cache
def _leaves_of_file(file: str) -> dict[str, Any]:
    return leaves(load_config(file))


def _finished(runs: Sequence[Run], workdir: AnyPath, results: AnyPath | None) -> dict[str, Row]:
    """Return the rows of runs that are complete."""
    rows = read_rows(workdir) | (read_rows(results) if results else {})
    wanted = {run.name: {str(steps) for steps in run.evaluate_steps} for run in runs}
    return {n: row for n, row in rows.items() if n in wanted and wanted[n] <= {*row.loss_at_steps}}


def _dataset(runs: Sequence[Run]) -> str:
    """Return the fingerprint of the runs' dataset; raise UserError if it does not match them."""
    found = set()
    configs = {(run.config.data, run.config.model.vocab_size): run.config for run in runs}
    for config in configs.values():
        mixture = open_data(config)
        for source in mixture.sources:
            source.split(SPLIT)
        found.add(mixture.fingerprint)
    (fingerprint,) = found
    return fingerprint


class _Grid:
    """Runs and the state of each."""

    def __init__(self, runs: Sequence[Run], workdir: AnyPath, results: AnyPath | None):
        self.runs, self.workdir, self.results = runs, workdir, results
        self.dataset = _dataset(runs)
        self.rows = _finished(runs, workdir, results)
        self.failed: dict[str, str] = {}
        self._spent = self._done = 0.0  # seconds and FLOPs of the runs done here
        other = {n: row.dataset for n, row in self.rows.items() if row.dataset != self.dataset}
        if other:
            raise UserError(
                f"{len(other)} finished runs were on another dataset than {self.dataset}, so they "
                "cannot be compared with new ones; use another --workdir and --results",
                *(f"{name}: dataset {dataset}" for name, dataset in [*other.items()][:5]),
            )

    def run(self) -> None:
        """Train all unfinished runs; report failures and keep them in `failed`."""
        waiting = [run for run in self.runs if run.name not in self.rows]
        _say(f"{len(self.runs)} runs, {len(self.runs) - len(waiting)} of them finished")
        self._write_table()
        for index, run in enumerate(waiting):
            _say(f"[{index + 1}/{len(waiting)}] {run.label}: {self.workdir / run.name}")
            began = time.monotonic()
            try:
                self._one(run)
            except (UserError, RunFailed) as error:
                self._fail(run, " ".join(str(error).split("\n")))
            except Exception as error:
                traceback.print_exc()
                self._fail(run, f"{type(error).__name__}: {error}")
            else:
                self._spent += time.monotonic() - began
                self._done += training_flops(run)
                self._report(run, waiting[index + 1 :])
            self._write_table()
            jax.clear_caches()
            gc.collect()
        for name, message in self.failed.items():
            _say(f"failed: {name}: {message}")

    def table(self) -> list[dict[str, Any]]:
        """Return one line per run, with None for what is not known yet."""
        return [self._line(run) for run in self.runs]

    def _one(self, run: Run) -> None:
        folder = self.workdir / run.name
        train(run.config, folder)
        row = measure(run, folder, self.dataset)
        row.write(folder / "row.json")
        if self.results is not None:
            row.write(self.results / f"{run.name}.json")
        self.rows[run.name] = row

    def _fail(self, run: Run, message: str) -> None:
        self.failed[run.name] = message
        _say(f"failed: {run.label}: {message}")

    def _report(self, run: Run, left: Sequence[Run]) -> None:
        words = f"{run.label}: test perplexity {self.rows[run.name].perplexity:.3f}"
        if left:
            seconds = self._spent / self._done * sum(map(training_flops, left))
            words += f"; {len(left)} left, ETA {format_duration(seconds)}"
        _say(words)

    def _line(self, run: Run) -> dict[str, Any]:
        row = self.rows.get(run.name)
        status = f"failed: {self.failed[run.name]}" if run.name in self.failed else "not finished"
        return {
            "run": run.name,
            "status": "finished" if row else status,
            "figures": "; ".join(f"{use.figure}: {use.arm}" for use in run.uses),
            "size": run.size,
            "learning_rate": run.config.optimizer.learning_rate,
            "seed": run.seed,
            **{name: getattr(row, name, None) for name in _MEASURED},
        }

    def _write_table(self) -> None:
        table = self.table()
        write_json(self.workdir / "table.json", {"runs": table})
        write_csv(self.workdir / "table.csv", table)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

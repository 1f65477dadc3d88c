"""Rows that match none of the requested figures, and the flags that would match them.

A report must be given the overrides of the sweep whose directory it reads. Without them the rows
match no run of the figures, and the report would be empty without saying why.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cem_jax.config import flattened, leaves
from cem_jax.errors import UserError
from cem_jax.studies.figures.grid import Run, Sweep, defaults, flag, is_trained, runs_of
from cem_jax.studies.figures.rows import Row

_MOST_FIELDS = 4


@dataclass(frozen=True)
class Unmatched:
    """Rows that differ in the same way from the figures' run nearest to them.

    Attributes:
      runs: the rows' names.
      size: their model size.
      nearest: that run's name in the figures; None where no figure has the size.
      fields: dotted field -> the rows' value, where it differs from the run's.
      overrides: flags under which these rows match the figures; empty if there are none.
    """

    runs: tuple[str, ...]
    size: str
    nearest: str | None
    fields: Mapping[str, Any]
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        count = f"{len(self.runs)} {'row' if len(self.runs) == 1 else 'rows'}"
        if self.nearest is None:
            return f"{count} of size {self.size}, which no requested figure has"
        if not self.fields:
            other = "data.mixture or the version of cem_jax"
            return f"{count} as {self.nearest} in all fields that rows hold; {other} is another"
        shown = [f"{name}={value}" for name, value in self.fields.items()][:_MOST_FIELDS]
        if len(self.fields) > len(shown):
            shown.append(f"and {len(self.fields) - len(shown)} fields more")
        told = f"{count} with {', '.join(shown)}"
        if self.overrides:
            return f"{told}; give {shlex.join(self.overrides)} for them"
        return f"{told}; the nearest is {self.nearest}"

    def json(self) -> dict[str, Any]:
        return {
            "rows": len(self.runs),
            "size": self.size,
            "differences": dict(self.fields),
            "nearest": self.nearest,
            "overrides": list(self.overrides),
            "runs": list(self.runs),
        }


def unmatched(
    sweeps: Sequence[Sweep],
    rows: Sequence[Row],
    overrides: Sequence[tuple[str, Any]] = (),
) -> list[Unmatched]:
    """Group rows that match no run of the sweeps under `overrides`, largest group first."""
    runs = {run.key: run for run in runs_of(sweeps, (0,), overrides)}
    values = [(run, _comparable(leaves(run.config))) for run in runs.values()]
    groups: dict[str, list[tuple[Row, Run | None, dict[str, Any]]]] = {}
    for row in rows:
        run, fields = _nearest(row, values)
        groups.setdefault(json.dumps([row.size, fields]), []).append((row, run, fields))
    found = [_group(members, sweeps, overrides) for members in groups.values()]
    return sorted(found, key=lambda group: -len(group.runs))


def _group(members, sweeps: Sequence[Sweep], overrides: Sequence[tuple[str, Any]]) -> Unmatched:
    row, run, fields = members[0]
    names = tuple(row.run for row, _, _ in members)
    keys = {row.key for row, _, _ in members}
    label = run and run.label.rpartition(", seed")[0]
    flags = tuple(_flags(fields, keys, sweeps, overrides)) if fields else ()
    return Unmatched(names, row.size, label, fields, flags)


def _nearest(
    row: Row, runs: Sequence[tuple[Run, Mapping[str, Any]]]
) -> tuple[Run | None, dict[str, Any]]:
    """Return (the run of the row's size with the fewest different fields, those fields)."""
    mine = _row_fields(row)
    found = [
        (run, {name: mine[name] for name in mine if mine[name] != theirs[name]})
        for run, theirs in runs
        if run.size == row.size
    ]
    return min(found, key=lambda pair: len(pair[1]), default=(None, {}))


def _flags(
    fields: Mapping[str, Any],
    keys: set[str],
    sweeps: Sequence[Sweep],
    overrides: Sequence[tuple[str, Any]],
) -> Iterator[str]:
    """Find overrides, by trial, that give the figures all rows of `keys`; empty if none do."""
    kept = [(name, value) for name, value in overrides if name not in fields]
    try:
        runs = runs_of(sweeps, (0,), [*kept, *fields.items()])
    except UserError:  # figures compare the field, or the value is incompatible with other fields
        return
    if keys <= {run.key for run in runs}:
        given = kept + list(fields.items())
        yield from (flag(name, value) for name, value in given)


def _row_fields(row: Row) -> dict[str, Any]:
    """Return a row's fields; ones that were added after it was written have their defaults."""
    default = defaults()
    kept = flattened(row.config)
    return _comparable(default | {name: kept[name] for name in kept if name in default})


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that distinguish runs, as in JSON; rows do not record data paths."""
    trained = {n: v for n, v in values.items() if is_trained(n) and n != "data.mixture"}
    return json.loads(json.dumps(trained))

"""Checkpoints of a run: asynchronous saves, retention, and restores that survive damage.

A checkpoint is one directory `<directory>/<step>/`, written by Orbax, where directories can be
renamed under another name until it is complete:

    state/             the arrays, as a nested dict of string keys (OCDBT, zstd)
    info/metadata      JSON: step, metric, every array's dtype and shape, the caller's `extra`
    checksums.sha256   every file's SHA-256, written last

Only directories with a checksum list count as checkpoints. The newest `keep` stay, beside them the
one with the lowest metric and the milestones, every so many steps; nothing is removed before the
save that replaces it is complete. What there is, `inventory` knows.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from cem_jax.distributed import session
from cem_jax.errors import RunFailed, UserError
from cem_jax.runs.integrity import LIST_NAME, Damage, is_whole, write_checksums
from cem_jax.runs.inventory import INFO_FILE, LEFTOVER, NAME, Inventory
from cem_jax.runs.low_priority import behind_the_steps
from cem_jax.runs.orbax_errors import one_line, say_once
from cem_jax.runs.tree_names import as_array, describe, differences, named_leaves, nested, placed
from cem_jax.storage.paths import entries, finish_removal, place, remove, set_aside
from cem_jax.storage.remote import is_url

_WITHOUT_RENAME = ocp.path.atomicity.CommitFileTemporaryPath


def _warn(line: str) -> None:
    print(f"cem: warning: {line}", file=sys.stderr, flush=True)


class Checkpointer:
    """The checkpoints of one run, below `directory` (a local path or an etils URL).

    With several processes each of them makes the same calls and writes its part of the arrays; the
    first one chooses what is restored, writes the lists, removes and reports.

    Args:
      keep: how many of the newest checkpoints stay, at least 1.
      keep_best: whether the one with the lowest metric stays as well.
      keep_every: those whose step is a multiple of it stay for ever, as do those saved as such
        under another value; None: no others.
      report: called with one plain line for each thing worth telling (default: stderr).
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int,
        keep_best: bool,
        keep_every: int | None = None,
        report: Callable[[str], None] = _warn,
    ):
        if keep < 1:
            raise UserError(f"checkpoint.keep must be at least 1, not {keep}")
        self.directory = place(directory)
        self._writes = session.is_first()
        self._keep, self._keep_best, self._keep_every = keep, keep_best, keep_every
        self._report = report if self._writes else lambda line: None
        self._there = Inventory(self.directory, self._report)
        self._info: dict[str, Any] = {}  # of the step being written in the background
        self._cleaned = False
        say_once()
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
            temporary_path_class=_WITHOUT_RENAME if is_url(self.directory) else None,
        )

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what there is ----

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, not known to be damaged, in order."""
        return self._there.steps()

    def latest_step(self) -> int | None:
        """The newest of `steps()`, None without any."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the lowest finite metric (the newest of equals), None without any."""
        return self._there.best(self.steps())

    def once_complete(self) -> list[str]:
        """Names of directories that were complete and are not any more: their lists are gone."""
        return self._there.once_complete()

    def describe(self, step: int) -> dict[str, Any]:
        """What an existing checkpoint says of itself: {step, metric, measure, milestone, arrays:
        {name: dtype and shape}, extra}."""
        return self._there.info(step)

    def newest_sound(self) -> int:
        """The newest step whose checkpoint is undamaged, the same in all processes.

        Raises:
          UserError: there is none.
        """
        return session.shared("the newest checkpoint", lambda: self._newest_sound(None))

    # ---- saving ----

    def save(
        self,
        step: int,
        state: Any,
        extra: Mapping[str, Any],
        metric: float | None = None,
        measure: str | None = None,
    ) -> None:
        """Start to save `state`; returns as soon as it may change or be donated.

        Args:
          state: a tree of arrays (Python numbers become 0-d arrays) whose leaves have names.
          extra: anything JSON can hold.
          metric: the validation loss, lower is better; None, NaN and infinities never win.
          measure: of what; metrics of different measures are not compared.

        Raises:
          RunFailed: this or the previous save could not be written.
        """
        self.wait()
        step = int(step)
        arrays = {name: as_array(name, leaf) for name, leaf in named_leaves(state).items()}
        info = {
            "step": step,
            "metric": _finite(metric),
            "measure": measure,
            "milestone": bool(self._is_multiple(step)),
            "arrays": {name: describe(array) for name, array in arrays.items()},
            "extra": json.loads(json.dumps(dict(extra), allow_nan=False)),
        }
        # Orbax refuses arrays without elements: their description says all there is to know.
        stored = nested({name: array for name, array in arrays.items() if array.size})
        try:
            self._make_room(step)
            self._there.saving, self._info = step, info
            arguments = ocp.args.Composite(
                state=ocp.args.PyTreeSave(stored), info=ocp.args.JsonSave(info)
            )
            with behind_the_steps():
                # force: an empty or unfinished directory of that name may stand there
                self._orbax.save(self.directory / str(step), args=arguments, force=True)
        except Exception as error:
            raise self._failure(step, error) from error

    def check(self) -> None:
        """Raise RunFailed if the save in the background has failed; cheap, never waits."""
        try:
            self._orbax.check_for_errors()
        except Exception as error:
            raise self._failure(self._there.saving, error) from error

    def wait(self) -> None:
        """Wait until the save in the background is complete, then remove what need not stay.

        Raises:
          RunFailed: the save could not be written.
        """
        step = self._there.saving
        if step is None:
            return
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise self._failure(step, error) from error
        self._there.saving = None
        self._there.note_saved(step, self._info)
        self._retain(step)

    def close(self) -> None:
        """Wait for the last save and release Orbax's threads. Raises RunFailed as `wait` does."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    # ---- restoring ----

    def restore(
        self, step: int | None, abstract_state: Any, *, partial: bool = False
    ) -> tuple[Any, dict[str, Any], int]:
        """Read the checkpoint of `step`, or the newest undamaged one for None.

        Args:
          abstract_state: a tree like the saved one of `jax.ShapeDtypeStruct` or arrays; each
            array is placed by its leaf's sharding, on the first device where it has none.
            Leaves are matched by name, so a dict can stand for a tuple with the same fields.
          partial: whether arrays that only the checkpoint has are left out rather than refused.

        Returns:
          The state (bit for bit as saved), `extra`, and the step they belong to.

        Raises:
          UserError: there is no such checkpoint, it is damaged (for None: all are), or its arrays
            differ from `abstract_state` in names, shapes or dtypes.
          RunFailed: a save still in the background could not be written.
        """
        self.wait()
        if session.processes() > 1:  # all read what the first one has found to be whole
            step = session.shared("the checkpoint", lambda: self._newest_sound(step))
        candidates = self._candidates(step)
        for candidate in candidates:
            if session.processes() == 1 and not self._there.sound(candidate):
                continue
            info = self.describe(candidate)
            lines = differences(info["arrays"], abstract_state, partial)
            if lines:
                raise UserError(f"checkpoint {candidate} holds another model's state:", *lines)
            try:
                state = self._read_state(candidate, abstract_state)
            except (MemoryError, jax.errors.JaxRuntimeError):
                raise  # the machine's fault, not the checkpoint's
            except Exception as error:
                if session.processes() > 1:
                    raise self._unreadable(candidate, error) from error
                # its bytes are those that were written: not reason enough to remove it
                self._there.note_damage(candidate, Damage(one_line(error), lasting=False))
                continue
            if step is None:
                self._tell_fallback(candidate)
            return state, info["extra"], candidate
        raise UserError(*self._there.damage_lines(candidates))

    def read_extra(self, step: int | None = None) -> dict[str, Any]:
        """The `extra` of the checkpoint of `step` (None: the newest readable), and no arrays.

        Raises:
          UserError: there is no such checkpoint or its JSON is damaged.
        """
        candidates = self._candidates(step)
        for candidate in candidates:
            if self._there.sound(candidate, INFO_FILE):
                return self.describe(candidate)["extra"]
        raise UserError(*self._there.damage_lines(candidates))

    # ---- inside ----

    def _candidates(self, step: int | None) -> list[int]:
        steps = self.steps()
        if step is None and steps:
            return steps[::-1]
        if step is not None and step in self._there.paths():
            return [step]
        known = f"there are: {', '.join(map(str, steps))}" if steps else "there is none at all"
        wanted = "no complete checkpoint" if step is None else f"no complete checkpoint {step}"
        raise UserError(f"{wanted} in {self.directory}; {known}", *self._there.damage_lines())

    def _newest_sound(self, step: int | None) -> int:
        candidates = self._candidates(step)
        found = next((one for one in candidates if self._there.sound(one)), None)
        if found is None:
            raise UserError(*self._there.damage_lines(candidates))
        if step is None:
            self._tell_fallback(found)
        return found

    def _tell_fallback(self, step: int) -> None:
        if any(damaged > step for damaged in self._there.damaged):
            self._there.report_once(f"continuing from checkpoint {step} in {self.directory}")

    def _unreadable(self, step: int, error: Exception) -> RunFailed:
        where = f"checkpoint {step} in {self.directory} cannot be read"
        return RunFailed(f"{where} by {session.whoami()}: {one_line(error)}")

    def _read_state(self, step: int, abstract_state: Any) -> Any:
        leaves = {name: placed(leaf) for name, leaf in named_leaves(abstract_state).items()}
        wanted = nested({name: leaf for name, leaf in leaves.items() if leaf.size})
        arguments = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        # A checkpointer would ask object stores for Orbax's own marker, which copies may lack.
        reader = ocp.CompositeCheckpointHandler()
        restored = reader.restore(self._there.paths()[step], ocp.args.Composite(state=arguments))
        reader.close()
        arrays = named_leaves(restored["state"])
        for name, leaf in leaves.items():
            if not leaf.size:
                arrays[name] = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        ordered = [arrays[name] for name in leaves]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), ordered)

    def _seal(self) -> None:
        """Orbax calls this in its thread when all files are written, before the rename."""
        step = self._there.saving
        unfinished = self.directory.glob(f"{step}.orbax-checkpoint-tmp*")
        write_checksums(next(iter(unfinished), self.directory / str(step)))

    def _make_room(self, step: int) -> None:
        """Clear leftovers of earlier processes; set aside a checkpoint of the same step."""
        if not self._writes:
            return
        # Not what it lies in: a run directory that was removed meanwhile is not to come again.
        self.directory.mkdir(parents=is_url(self.directory), exist_ok=True)
        if not self._cleaned:
            self._clear_leftovers()
            self._cleaned = True
        path = self.directory / str(step)
        if is_whole(path):
            set_aside(path, self.directory / f"{step}.replaced", last=LIST_NAME)

    def _clear_leftovers(self) -> None:
        for path in entries(self.directory):
            if LEFTOVER.fullmatch(path.name):
                finish_removal(path)

    def _retain(self, newest: int) -> None:
        """Remove what retention lets go, now that `newest` is complete.

        Later steps are what an earlier run left when it went back to a step before them.
        """
        if not self._writes:
            return
        ours = (step for step in self.steps() if step <= newest)
        best = self._there.best(ours) if self._keep_best else None
        paths = self._there.paths()
        earlier = [step for step in self.steps() if step < newest]
        kept = {newest, best, *earlier[::-1][: self._keep - 1]} - {None}
        kept |= {s for s in earlier if self._is_multiple(s) or self._there.milestone(s)}
        kept_paths = {paths[step] for step in kept}
        for path in entries(self.directory):
            match = NAME.fullmatch(path.name)
            if not match or int(match[1]) not in paths or path in kept_paths:
                continue
            if self._there.may_go(int(match[1])):
                try:
                    remove(path)
                except OSError as error:
                    self._there.report_once(f"{path} could not be removed: {error}")

    def _is_multiple(self, step: int) -> bool:
        return self._keep_every is not None and step % self._keep_every == 0

    def _failure(self, step: int | None, error: Exception) -> RunFailed:
        newest = self.latest_step()
        self._there.saving = None
        if self._writes:
            with contextlib.suppress(OSError):  # what it left may be what filled the disk
                self._clear_leftovers()
        rest = "no checkpoint is complete" if newest is None else f"the newest complete is {newest}"
        where = f"checkpoint {step} could not be written to {self.directory}"
        return RunFailed(f"{where}: {one_line(error)}; {rest}")


def _finite(metric: float | None) -> float | None:
    return float(metric) if metric is not None and math.isfinite(metric) else None

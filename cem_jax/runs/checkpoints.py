"""The checkpoints of a run: `Reader` finds, checks and restores them, `Writer` also saves them.

A checkpoint is a directory `<directory>/<step>/`, written by Orbax (under a temporary name until it
is complete, where directories can be renamed):

    state/             the arrays, as a nested dict of string keys (OCDBT, zstd)
    info/metadata      JSON: `Info`, with the run's `Position` under `extra`
    checksums.sha256   every file's SHA-256, written last

Only directories with a checksum list count as checkpoints. The newest `keep` stay, as do the one
with the lowest metric and milestones at regular steps; nothing is removed before the save that
replaces it is complete.

Retention does not use `orbax.checkpoint.CheckpointManager`: its policies choose when a save begins,
among all directories, so a damaged checkpoint could count as one of the newest or as the best; its
metrics have no measure, and old checkpoints lack them; and it refuses to save a step twice. Reading
needs our own listing in any case, to fall back to the next newest.
"""

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from cem_jax.distributed import session
from cem_jax.errors import RunFailed, UserError
from cem_jax.runs.arrays import (
    dtype_and_shape,
    low_priority_threads,
    mismatches,
    named_arrays,
    one_line,
    read_arrays,
    report_failures_once,
    to_write,
)
from cem_jax.runs.integrity import LIST_NAME, Damage, find_damage, is_whole, write_checksums
from cem_jax.runs.position import Position
from cem_jax.storage.paths import (
    AnyPath,
    doomed,
    entries,
    finish_removal,
    is_url,
    place,
    remove,
    set_aside,
)

INFO_FILE = "info/metadata"
_NAME = re.compile(r"(0|[1-9][0-9]*)(\.replaced)?")  # .replaced: set aside during a new save
_LEFTOVER = re.compile(r"[0-9]+\.(orbax-checkpoint-tmp.*|removed)")
_TRIES = 10  # to find a checkpoint that is not removed before it is read
_WITHOUT_RENAME = ocp.path.atomicity.CommitFileTemporaryPath


def warn(line: str) -> None:
    """Print `line` to standard error as a warning."""
    print(f"cem: warning: {line}", file=sys.stderr, flush=True)


class Info(NamedTuple):
    """The metadata of a checkpoint.

    metric: validation loss; None if not measured or not finite.
    measure: what the metric was measured on; metrics with different measures are not compared.
    milestone: whether it is kept forever.
    arrays: every array's dtype and shape, by name.
    """

    step: int
    metric: float | None
    measure: str | None
    milestone: bool
    arrays: dict[str, str]
    position: Position

    @classmethod
    def read(cls, checkpoint: AnyPath) -> "Info":
        values = json.loads((checkpoint / INFO_FILE).read_text())
        position = Position.parse(values["step"], values.pop("extra"))
        # the first versions had neither measures nor milestones
        return cls(**{"measure": None, "milestone": False} | values, position=position)

    def stored(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        values = self._asdict()
        extra = values.pop("position").stored()
        return values | {"extra": json.loads(json.dumps(extra, allow_nan=False))}


@dataclass
class _Listed:
    """A complete checkpoint, and what this process knows about it.

    path: the directory to read it from.
    directories: all directories named after its step, including incomplete ones.
    checked: whether this process has read it completely, or written it.
    """

    path: AnyPath
    directories: list[AnyPath]
    info: Info | None = None
    damage: Damage | None = None
    checked: bool = False


class _Removed(Exception):
    """A listed checkpoint has been removed since, by training or by hand."""


class Reader:
    """Read-only access to the checkpoints below `directory` (a local path or an etils URL).

    The directory is listed once. Training may remove a checkpoint after that: if the chosen one is
    gone, the reader lists again and takes the next newest.

    Args:
      report: called with each warning, one line (default: print to stderr).
    """

    def __init__(self, directory: str | os.PathLike[str], *, report: Callable[[str], None] = warn):
        self.directory = place(directory)
        self._report = report if session.current().is_first else lambda line: None
        self._reported: set[str] = set()
        self._list()

    def _list(self) -> None:
        """List the checkpoints; report incomplete ones once."""
        self._found: dict[int, _Listed] = {}
        self.once_complete: list[str] = []  # names of those without their checksum list
        listed = entries(self.directory)
        half_removed = doomed(listed)
        directories: dict[int, list[AnyPath]] = {}
        for path in listed:
            match = _NAME.fullmatch(path.name)
            if path.name in half_removed or not (match or _LEFTOVER.fullmatch(path.name)):
                continue
            complete = is_whole(path)
            if match:
                step = int(match[1])
                directories.setdefault(step, []).append(path)
                if complete:  # "30" sorts before "30.replaced"
                    self._found.setdefault(step, _Listed(path, directories[step]))
            if not (match and complete):
                self._report_once(f"{path} is not a complete checkpoint: ignored")
            if not complete and _was_complete(path):
                self.once_complete.append(path.name)

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint that is not known to be damaged, in order."""
        return sorted(step for step, listed in self._found.items() if listed.damage is None)

    def latest_step(self) -> int | None:
        """Return the newest of `steps()`, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Return the undamaged step with the lowest metric, or None if no step has a metric.

        Only steps with the measure of the newest measured one compete; the newest wins ties.
        """
        return self._best(self.steps())

    def info(self, step: int) -> Info:
        """Return the metadata of checkpoint `step`. Raises UserError if it cannot be read."""
        info = self._known_info(step) if step in self._found else None
        if info is None:
            raise UserError(*map(self._damage_line, self._candidates(step)))
        return info

    def restore(
        self,
        step: int | None,
        wanted: Any | Callable[[Info], Any],
        *,
        partial: bool = False,
    ) -> tuple[Any, Info]:
        """Restore the checkpoint of `step`, or the newest undamaged one for None.

        Args:
          wanted: a tree of `jax.ShapeDtypeStruct` or arrays like the saved one, or a function from
            `Info` to it. Each array is placed by its leaf's sharding, or on the first device if it
            has none. Leaves are matched by name, so a dict can replace a tuple of the same fields.
          partial: ignore arrays that only the checkpoint has, rather than refuse them.

        Returns:
          The state, bit for bit as saved, and the checkpoint's metadata.

        Raises:
          UserError: no such checkpoint exists, it is damaged (for None: all are), or its arrays
            differ from `wanted` in names, shapes or dtypes.
          RunFailed: one of several processes cannot read it.
        """
        while True:
            # All processes read the checkpoint that the first one has found undamaged.
            chosen = session.current().shared(
                "the checkpoint", lambda: self._newest_undamaged(step)
            )
            if chosen not in self._found:
                self._list()
            path = self._found[chosen].path
            info = self._found[chosen].info or Info.read(path)
            abstract = wanted(info) if callable(wanted) else wanted
            if lines := mismatches(info.arrays, abstract, partial):
                raise UserError(f"checkpoint {chosen} holds another model's state:", *lines)
            try:
                state = read_arrays(path, abstract)
            except (MemoryError, jax.errors.JaxRuntimeError):
                raise  # the machine's fault, not the checkpoint's
            except Exception as error:
                if session.current().processes > 1:
                    raise self._unreadable(chosen, error) from error
                if not self._is_removed(chosen):
                    # its bytes are as written, so this does not justify removing it
                    self._found[chosen].damage = Damage(one_line(error), lasting=False)
                    self._report_once(self._damage_line(chosen))
                continue
            if step is None and any(damaged > chosen for damaged in self._damaged()):
                self._report_once(f"continuing from checkpoint {chosen} in {self.directory}")
            return state, info

    def _newest_undamaged(self, step: int | None) -> int:
        for _ in range(_TRIES):
            candidates = self._candidates(step)
            try:
                found = next((one for one in candidates if self._is_sound(one)), None)
            except _Removed:
                self._list()
                continue
            if found is None:
                raise UserError(*map(self._damage_line, candidates))
            return found
        raise RunFailed(f"{self.directory}: checkpoints are removed faster than they can be read")

    def _candidates(self, step: int | None) -> list[int]:
        """Return the steps, newest first, or `step` alone. Raises UserError if there are none."""
        steps = self.steps()
        if step is None and steps:
            return steps[::-1]
        if step is not None and step in self._found:
            return [step]
        known = f"there are: {', '.join(map(str, steps))}" if steps else "there is none at all"
        wanted = "no complete checkpoint" if step is None else f"no complete checkpoint {step}"
        lines = [self._damage_line(damaged) for damaged in self._damaged()]
        raise UserError(f"{wanted} in {self.directory}; {known}", *lines)

    def _damaged(self) -> list[int]:
        return sorted(step for step, listed in self._found.items() if listed.damage is not None)

    def _damage_line(self, step: int) -> str:
        return f"checkpoint {step} in {self.directory} is damaged: {self._found[step].damage}"

    def _unreadable(self, step: int, error: Exception) -> RunFailed:
        where = f"checkpoint {step} in {self.directory} cannot be read"
        return RunFailed(f"{where} by {session.whoami()}: {one_line(error)}")

    def _best(self, steps: Iterable[int]) -> int | None:
        infos = {step: self._known_info(step) for step in steps}
        scored = [step for step, info in infos.items() if info and info.metric is not None]
        if not scored:
            return None
        measure = infos[max(scored)].measure
        alike = [step for step in scored if infos[step].measure == measure]
        ordered = sorted(alike, key=lambda step: (infos[step].metric, -step))
        return next((s for s in ordered if self._found[s].checked or self._is_sound(s)), None)

    def _known_info(self, step: int) -> Info | None:
        """Return the metadata of `step`, or None if it is damaged."""
        listed = self._found[step]
        if listed.info is None:
            self._is_sound(step, INFO_FILE)
        return listed.info if listed.damage is None else None

    def _is_sound(self, step: int, only: str | None = None) -> bool:
        """Return whether `step` (`only`: this one file) is undamaged; report damage."""
        listed = self._found[step]
        if listed.damage is None:
            listed.damage = self._examine(step, only)
            listed.checked = only is None
        if listed.damage is not None:
            self._report_once(self._damage_line(step))
        return listed.damage is None

    def _examine(self, step: int, only: str | None = None) -> Damage | None:
        """Return the damage of `step`, or None. Raises _Removed."""
        listed = self._found[step]
        damage = find_damage(listed.path, only)
        if damage is not None:
            if self._is_removed(step):
                raise _Removed
            return damage
        listed.info = Info.read(listed.path)
        if listed.info.step != step:  # the user may rename it back
            other = listed.info.step
            return Damage(f"it is of step {other}: the directory was renamed", lasting=False)
        return None

    def _is_removed(self, step: int) -> bool:
        path = self._found[step].path
        return not path.exists() or path.name in doomed(entries(self.directory))

    def _report_once(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self._report(line)


class Writer(Reader):
    """The checkpoints of the run that this process trains.

    With several processes, each makes the same calls and writes its part of the arrays; the first
    one also writes the checksum lists, removes checkpoints and reports.

    Args:
      keep: number of newest checkpoints to keep, at least 1.
      keep_best: whether to keep the one with the lowest metric too.
      keep_every: keep multiples of this step forever (None: none), as well as earlier milestones
        saved under another value.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int,
        keep_best: bool,
        keep_every: int | None = None,
        report: Callable[[str], None] = warn,
    ):
        super().__init__(directory, report=report)
        self._keep, self._keep_best, self._keep_every = keep, keep_best, keep_every
        self._saving: Info | None = None  # the one being written in the background
        self._cleaned = False
        report_failures_once()
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
            temporary_path_class=_WITHOUT_RENAME if is_url(self.directory) else None,
        )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        state: Any,
        position: Position,
        metric: float | None = None,
        measure: str | None = None,
    ) -> None:
        """Start saving `state`; return as soon as it may be changed or donated.

        Args:
          state: a tree of arrays (Python numbers become 0-d arrays) whose leaves have names.
          position: the run's position; the checkpoint is named after its step.
          metric: validation loss; None, NaN and infinities never win.
          measure: what the metric was measured on.

        Raises:
          RunFailed: this or the previous save could not be written.
        """
        self.wait()
        arrays = named_arrays(state)
        info = Info(
            position.step,
            float(metric) if metric is not None and math.isfinite(metric) else None,
            measure,
            self._is_multiple(position.step),
            {name: dtype_and_shape(array) for name, array in arrays.items()},
            position,
        )
        arguments = ocp.args.Composite(
            state=to_write(arrays), info=ocp.args.JsonSave(info.stored())
        )
        try:
            self._make_room(info.step)
            self._saving = info
            with low_priority_threads():
                # force: an empty or unfinished directory of that name may exist
                self._orbax.save(str(self.directory / str(info.step)), args=arguments, force=True)
        except Exception as error:
            raise self._failure(info.step, error) from error

    def check(self) -> None:
        """Raise RunFailed if the background save has failed; never waits."""
        try:
            self._orbax.check_for_errors()
        except Exception as error:
            raise self._failure(self._saving and self._saving.step, error) from error

    def wait(self) -> None:
        """Wait for the background save, then remove checkpoints that need not be kept.

        Raises:
          RunFailed: the save could not be written.
        """
        info = self._saving
        if info is None:
            return
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise self._failure(info.step, error) from error
        self._saving = None
        path, replaced = self.directory / str(info.step), self._found.get(info.step)
        aside = [] if replaced is None else [p for p in replaced.directories if p != path]
        self._found[info.step] = _Listed(path, [path, *aside], info, checked=True)
        if session.current().is_first:
            with contextlib.suppress(_Removed):  # by hand just now; the next save retries
                self._retain(info.step)

    def close(self) -> None:
        """Wait for the last save and release Orbax's threads. Raises RunFailed as `wait` does."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def restore(
        self, step: int | None, wanted: Any | Callable[[Info], Any], *, partial: bool = False
    ) -> tuple[Any, Info]:
        """Restore as `Reader.restore` does, after waiting for the background save."""
        self.wait()
        return super().restore(step, wanted, partial=partial)

    def _seal(self) -> None:
        """Write the checksum list; Orbax calls this in its thread, before the rename."""
        step = self._saving.step
        unfinished = self.directory.glob(f"{step}.orbax-checkpoint-tmp*")
        write_checksums(next(iter(unfinished), self.directory / str(step)))

    def _make_room(self, step: int) -> None:
        """Clear leftovers of earlier processes; set aside a checkpoint of the same step."""
        if not session.current().is_first:
            return
        # Without parents: a run directory that was removed meanwhile must not reappear.
        self.directory.mkdir(parents=is_url(self.directory), exist_ok=True)
        if not self._cleaned:
            self._clear_leftovers()
            self._cleaned = True
        path = self.directory / str(step)
        if is_whole(path):
            aside = self.directory / f"{step}.replaced"
            set_aside(path, aside, last=LIST_NAME)
            self._found[step] = _Listed(aside, [aside])

    def _clear_leftovers(self) -> None:
        for path in entries(self.directory):
            if _LEFTOVER.fullmatch(path.name):
                finish_removal(path)

    def _retain(self, newest: int) -> None:
        """Remove checkpoints that need not be kept, now that `newest` is complete.

        Later steps are left over from before the run went back to an earlier step.
        """
        for step in [s for s, listed in self._found.items() if not listed.path.exists()]:
            del self._found[step]  # removed by someone else: not one of the newest
        earlier = [step for step in self.steps() if step < newest]
        kept = {newest, *earlier[::-1][: self._keep - 1]}
        kept |= {s for s in earlier if self._is_multiple(s) or self._is_milestone(s)}
        if self._keep_best:
            kept.add(self._best([*earlier, newest]))
        for step, listed in list(self._found.items()):
            staying = [listed.path] if step in kept or not self._may_go(step) else []
            for path in listed.directories:
                if path not in staying and not self._remove(path):
                    staying.append(path)
            listed.directories = staying
            if not staying:
                del self._found[step]

    def _may_go(self, step: int) -> bool:
        """Return whether retention may remove `step`.

        A damaged checkpoint is read once more, and stays unless that confirms lasting damage.
        """
        damage = self._found[step].damage
        if damage is None:
            return True
        again = self._examine(step) if damage.lasting else damage
        if again is not None and again.lasting:
            return True
        self._found[step].damage = Damage(str(damage), lasting=False)
        self._report_once(f"checkpoint {step} in {self.directory} stays: it may be readable again")
        return False

    def _remove(self, path: AnyPath) -> bool:
        try:
            remove(path)
        except FileNotFoundError:
            pass  # removed by someone else
        except OSError as error:
            self._report_once(f"{path} could not be removed: {error}")
            return False
        return True

    def _is_multiple(self, step: int) -> bool:
        return self._keep_every is not None and step % self._keep_every == 0

    def _is_milestone(self, step: int) -> bool:
        info = self._known_info(step)
        return info is not None and info.milestone

    def _failure(self, step: int | None, error: Exception) -> RunFailed:
        newest = self.latest_step()
        self._saving = None
        if session.current().is_first:
            with contextlib.suppress(OSError):  # its leftovers may have filled the disk
                self._clear_leftovers()
        rest = "no checkpoint is complete" if newest is None else f"the newest complete is {newest}"
        where = f"checkpoint {step} could not be written to {self.directory}"
        return RunFailed(f"{where}: {one_line(error)}; {rest}")


def _was_complete(path: AnyPath) -> bool:
    """Return whether the directory, now without a checksum list, was once complete."""
    if path.name.endswith(".removed"):  # removed after a complete one replaced it
        return True
    if not _NAME.fullmatch(path.name) or not path.is_dir():
        return False
    if is_url(path):  # written in place, so it may be a killed save
        return (path / "commit_success.txt").exists()
    return any(path.iterdir())  # renamed to this only when complete

"""The checkpoints of a run: `Reader` finds, judges and restores them, `Writer` also saves them.

A checkpoint is one directory `<directory>/<step>/`, written by Orbax; where directories can be
renamed, under another name until it is complete:

    state/             the arrays, as a nested dict of string keys (OCDBT, zstd)
    info/metadata      JSON: `Info`, with the run's `Position` under `extra`
    checksums.sha256   every file's SHA-256, written last

Only directories with a checksum list count as checkpoints. The newest `keep` stay, beside them the
one with the lowest metric and the milestones, every so many steps; nothing is removed before the
save that replaces it is complete.

Retention is ours, not that of `orbax.checkpoint.CheckpointManager`: its policies choose when a save
begins, among all directories, so that a damaged checkpoint would count as one of the newest or as
the best; its metrics have no measure and are stored where old checkpoints have none; and it refuses
to save a step again. Reading needs our own listing in any case, to fall back on the next newest.
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
_NAME = re.compile(r"(0|[1-9][0-9]*)(\.replaced)?")  # .replaced: set aside while saved again
_LEFTOVER = re.compile(r"[0-9]+\.(orbax-checkpoint-tmp.*|removed)")
_TRIES = 10  # listings, where each chosen checkpoint has been removed before it was read
_WITHOUT_RENAME = ocp.path.atomicity.CommitFileTemporaryPath


def warn(line: str) -> None:
    """Print `line` to standard error as a warning."""
    print(f"cem: warning: {line}", file=sys.stderr, flush=True)


class Info(NamedTuple):
    """What a checkpoint says of itself.

    metric: the validation loss, lower is better; None: not measured, or not finite.
    measure: what the metric was measured on; metrics of different measures are not compared.
    milestone: whether it stays for ever.
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
        """As JSON can hold it."""
        values = self._asdict()
        extra = values.pop("position").stored()
        return values | {"extra": json.loads(json.dumps(extra, allow_nan=False))}


@dataclass
class _Listed:
    """A complete checkpoint, and what this process has found out about it.

    path: the directory it is read from.
    directories: all that are named after its step, incomplete ones too.
    checked: whether it was read to its end, or written, by this process.
    """

    path: AnyPath
    directories: list[AnyPath]
    info: Info | None = None
    damage: Damage | None = None
    checked: bool = False


class _Removed(Exception):
    """A checkpoint that was listed has been removed since, by a training or by hand."""


class Reader:
    """The checkpoints below `directory` (a local path or an etils URL). Nothing here writes.

    The directory is listed once. A training may remove a checkpoint after that: a reader that finds
    its choice gone lists again and takes the next newest one.

    Args:
      report: called with one plain line for each thing worth telling (default: stderr).
    """

    def __init__(self, directory: str | os.PathLike[str], *, report: Callable[[str], None] = warn):
        self.directory = place(directory)
        self._report = report if session.current().is_first else lambda line: None
        self._reported: set[str] = set()
        self._list()

    def _list(self) -> None:
        """Read what is there; tell once of directories that only look like a checkpoint."""
        self._found: dict[int, _Listed] = {}
        self.once_complete: list[str] = []  # names of those that have lost their checksum lists
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

    # ---- what there is ----

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, not known to be damaged, in order."""
        return sorted(step for step, listed in self._found.items() if listed.damage is None)

    def latest_step(self) -> int | None:
        """The newest of `steps()`, None without any."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The undamaged step with the lowest metric, None where none has one; see `Info`.

        Only those measured as the newest measured one was compete; of equals, the newest wins.
        """
        return self._best(self.steps())

    def info(self, step: int) -> Info:
        """What the checkpoint of `step` says of itself. Raises UserError if it cannot be read."""
        info = self._known_info(step) if step in self._found else None
        if info is None:
            raise UserError(*map(self._damage_line, self._candidates(step)))
        return info

    # ---- restoring ----

    def restore(
        self,
        step: int | None,
        wanted: Any | Callable[[Info], Any],
        *,
        partial: bool = False,
    ) -> tuple[Any, Info]:
        """Read the checkpoint of `step`, or the newest undamaged one for None.

        Args:
          wanted: a tree like the saved one of `jax.ShapeDtypeStruct` or arrays, or a function that
            makes it, given what the checkpoint says of itself. Each array is placed by its leaf's
            sharding, on the first device where it has none. Leaves are matched by name, so a dict
            can stand for a tuple with the same fields.
          partial: whether arrays that only the checkpoint has are left out rather than refused.

        Returns:
          The state, bit for bit as saved, and what the checkpoint says of itself.

        Raises:
          UserError: there is no such checkpoint, it is damaged (for None: all are), or its arrays
            differ from `wanted` in names, shapes or dtypes.
          RunFailed: one of several processes cannot read it.
        """
        while True:
            # All processes read what the first one has found to be undamaged.
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
                    # its bytes are those that were written: not reason enough to remove it
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
        """The newest first; `step` alone if given. Raises UserError where there is none."""
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

    # ---- judging ----

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
        """The info of `step`; None if it is damaged."""
        listed = self._found[step]
        if listed.info is None:
            self._is_sound(step, INFO_FILE)
        return listed.info if listed.damage is None else None

    def _is_sound(self, step: int, only: str | None = None) -> bool:
        """Whether it is undamaged (`only`: this one file of it); tells if it is not."""
        listed = self._found[step]
        if listed.damage is None:
            listed.damage = self._examine(step, only)
            listed.checked = only is None
        if listed.damage is not None:
            self._report_once(self._damage_line(step))
        return listed.damage is None

    def _examine(self, step: int, only: str | None = None) -> Damage | None:
        """What is wrong with it, None if nothing is. Raises _Removed."""
        listed = self._found[step]
        damage = find_damage(listed.path, only)
        if damage is not None:
            if self._is_removed(step):
                raise _Removed
            return damage
        listed.info = Info.read(listed.path)
        if listed.info.step != step:  # whoever gave it this name may give it its own again
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

    With several processes each of them makes the same calls and writes its part of the arrays; the
    first one writes the checksum lists, removes and reports.

    Args:
      keep: how many of the newest checkpoints stay, at least 1.
      keep_best: whether the one with the lowest metric stays as well.
      keep_every: those whose step is a multiple of it stay for ever, as do those saved as such
        under another value; None: no others.
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
        """Start to save `state`; returns as soon as it may change or be donated.

        Args:
          state: a tree of arrays (Python numbers become 0-d arrays) whose leaves have names.
          position: where the run is; the checkpoint is named after its step.
          metric: the validation loss; None, NaN and infinities never win.
          measure: what it was measured on.

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
                # force: an empty or unfinished directory of that name may be there
                self._orbax.save(str(self.directory / str(info.step)), args=arguments, force=True)
        except Exception as error:
            raise self._failure(info.step, error) from error

    def check(self) -> None:
        """Raise RunFailed if the save in the background has failed; cheap, never waits."""
        try:
            self._orbax.check_for_errors()
        except Exception as error:
            raise self._failure(self._saving and self._saving.step, error) from error

    def wait(self) -> None:
        """Wait until the save in the background is complete, then remove what need not stay.

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
            with contextlib.suppress(_Removed):  # by hand just now: the next save goes through it
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
        """As `Reader.restore`, once the save in the background is complete."""
        self.wait()
        return super().restore(step, wanted, partial=partial)

    def _seal(self) -> None:
        """Orbax calls this in its thread when all files are written, before the rename."""
        step = self._saving.step
        unfinished = self.directory.glob(f"{step}.orbax-checkpoint-tmp*")
        write_checksums(next(iter(unfinished), self.directory / str(step)))

    def _make_room(self, step: int) -> None:
        """Clear leftovers of earlier processes; set aside a checkpoint of the same step."""
        if not session.current().is_first:
            return
        # The directory alone: a run directory that was removed meanwhile must not reappear.
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
        """Remove what need not stay, now that `newest` is complete.

        Later steps are what an earlier run left when it went back to a step before them.
        """
        for step in [s for s, listed in self._found.items() if not listed.path.exists()]:
            del self._found[step]  # somebody else removed it: it is not one of the newest
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
        """Whether retention may remove it: not where it only could not be read for a while.

        A damaged one is read once more, and stays unless that finds damage that lasts.
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
            pass  # somebody else was first
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
            with contextlib.suppress(OSError):  # what it left may be what filled the disk
                self._clear_leftovers()
        rest = "no checkpoint is complete" if newest is None else f"the newest complete is {newest}"
        where = f"checkpoint {step} could not be written to {self.directory}"
        return RunFailed(f"{where}: {one_line(error)}; {rest}")


def _was_complete(path: AnyPath) -> bool:
    """Whether the directory, which has no checksum list, was written to its end once."""
    if path.name.endswith(".removed"):  # it goes because a complete one has replaced it
        return True
    if not _NAME.fullmatch(path.name) or not path.is_dir():
        return False
    if is_url(path):  # written in its place, so that a save may have been killed in it
        return (path / "commit_success.txt").exists()
    return any(path.iterdir())  # it gets this name when it is complete

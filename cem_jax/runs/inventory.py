"""The checkpoints in one directory: which are complete, what each says of itself, what ails it."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from etils import epath

from cem_jax.runs.integrity import Damage, find_damage, is_whole
from cem_jax.storage.paths import doomed, entries
from cem_jax.storage.remote import is_url

INFO_FILE = "info/metadata"
# .replaced: set aside while its step is saved again
NAME = re.compile(r"(0|[1-9][0-9]*)(\.replaced)?")
LEFTOVER = re.compile(r"[0-9]+\.(orbax-checkpoint-tmp.*|removed)")


class Inventory:
    """What is in `directory`. Nothing here writes.

    Args:
      report: called with one plain line for each thing worth telling.
    """

    def __init__(self, directory: epath.Path, report: Callable[[str], None]):
        self.directory = directory
        self.damaged: dict[int, Damage] = {}
        self.saving: int | None = None  # the step being written in the background
        self._report = report
        self._reported: set[str] = set()
        self._checked: set[int] = set()  # read to their end, or written, by this process
        self._summaries: dict[int, dict[str, Any]] = {}

    def paths(self) -> dict[int, epath.Path]:
        """Complete checkpoints by step; tells once of directories that only look like one."""
        paths: dict[int, epath.Path] = {}
        gone = doomed(self.directory)
        for path in entries(self.directory):
            match = NAME.fullmatch(path.name)
            if path.name in gone:
                continue
            if match and is_whole(path):
                paths.setdefault(int(match[1]), path)  # "30" sorts before "30.replaced"
            elif (match or LEFTOVER.fullmatch(path.name)) and not self._is_own(path):
                self.report_once(f"{path} is not a complete checkpoint: ignored")
        return paths

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, not known to be damaged, in order."""
        return sorted(set(self.paths()) - set(self.damaged))

    def once_complete(self) -> list[str]:
        """Names of directories that were written to their end, but have lost their list of sums."""
        return [p.name for p in entries(self.directory) if not is_whole(p) and self._was_whole(p)]

    def info(self, step: int) -> dict[str, Any]:
        """What the checkpoint of `step` says of itself."""
        return json.loads((self.paths()[step] / INFO_FILE).read_text())

    def milestone(self, step: int) -> bool:
        """Whether it was saved as one that stays for ever."""
        return self._summary(step).get("milestone", False)

    def best(self, steps: Iterable[int]) -> int | None:
        """The sound one of the lowest metric, among those measured as the newest measured one was.

        The newest of equals; None where none has a finite metric.
        """
        known = {step: self._summary(step) for step in steps}
        scored = [step for step in known if known[step].get("metric") is not None]
        if not scored:
            return None
        measure = known[max(scored)].get("measure")
        alike = [step for step in scored if known[step].get("measure") == measure]
        ordered = sorted(alike, key=lambda step: (known[step]["metric"], -step))
        return next((s for s in ordered if s in self._checked or self.sound(s)), None)

    def sound(self, step: int, only: str | None = None) -> bool:
        """Whether it is undamaged (`only`: this one file of it); tells if it is not."""
        damage = self.examine(step, only)
        if damage is not None:
            self.note_damage(step, damage)
        elif only is None:
            self._checked.add(step)
        return damage is None

    def examine(self, step: int, only: str | None = None) -> Damage | None:
        """What is wrong with it, None if nothing is."""
        damage = find_damage(self.paths()[step], only)
        if damage is None and (of := self.info(step)["step"]) != step:
            # whoever gave it this name may give it its own again
            damage = Damage(f"it is of step {of}: the directory was renamed", lasting=False)
        return damage

    def note_damage(self, step: int, damage: Damage) -> None:
        """From here on it counts as damaged."""
        self.damaged[step] = damage
        self.report_once(f"checkpoint {step} in {self.directory} is damaged: {damage}")

    def note_saved(self, step: int, info: dict[str, Any]) -> None:
        """This process has written it anew."""
        self.damaged.pop(step, None)
        self._checked.add(step)
        self._summaries[step] = _summary(info)

    def damage_lines(self, steps: Iterable[int] = ()) -> list[str]:
        """A line for each of `steps`, or for every damaged one, with what is wrong."""
        return [
            f"checkpoint {step} in {self.directory} is damaged: {self.damaged[step]}"
            for step in steps or sorted(self.damaged)
        ]

    def may_go(self, step: int) -> bool:
        """Whether retention may remove it: not where it only could not be read for a while.

        A damaged one is read once more, and stays unless that finds damage that lasts.
        """
        damage = self.damaged.get(step)
        if damage is None:
            return True
        again = self.examine(step) if damage.lasting else damage
        if again is not None and again.lasting:
            return True
        self.damaged[step] = Damage(str(damage), lasting=False)
        self.report_once(f"checkpoint {step} in {self.directory} stays: it may be readable again")
        return False

    def report_once(self, line: str) -> None:
        """Tell `line` unless it has been told."""
        if line not in self._reported:
            self._reported.add(line)
            self._report(line)

    def _is_own(self, path: epath.Path) -> bool:
        """Whether `path` belongs to the save now running."""
        return self.saving is not None and path.name.split(".")[0] == str(self.saving)

    def _was_whole(self, path: epath.Path) -> bool:
        if path.name.endswith(".removed"):  # what goes has been replaced by a complete one
            return True
        if not NAME.fullmatch(path.name) or not path.is_dir():
            return False
        if is_url(path):  # written in its place, so that a save may have been killed in it
            return (path / "commit_success.txt").exists()
        return any(path.iterdir())  # it gets this name when it is complete

    def _summary(self, step: int) -> dict[str, Any]:
        if step not in self._summaries:
            sound = self.examine(step, INFO_FILE) is None
            self._summaries[step] = _summary(self.info(step)) if sound else {}
        return self._summaries[step]


def _summary(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info.get(name) for name in ("metric", "measure", "milestone")}

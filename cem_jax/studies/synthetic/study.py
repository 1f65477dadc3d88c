"""The study of regression on functions drawn from Gaussian processes (Table 3).

The work directory gets a JSON file per kernel as soon as it is finished, which a rerun of the same
command reuses, and at the end table.json and table.png.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from cem_jax.errors import UserError
from cem_jax.sharding.mesh import require_devices
from cem_jax.studies.figures.rows import write_json
from cem_jax.studies.synthetic.data import KERNELS, Data, describe, make_data
from cem_jax.studies.synthetic.models import MODELS, sizes
from cem_jax.studies.synthetic.training import BATCH, PEAK, fit
from cem_jax.text import ProgressLine, format_duration


class Settings(NamedTuple):
    """The size of a study, the same for all kernels and models."""

    seeds: int
    steps: int
    points: int
    test_points: int = 4000

    def described(self, kernel: str) -> dict[str, Any]:
        """Return everything that the results of a kernel depend on."""
        training = {"batch": BATCH, "learning_rate": PEAK}
        return self._asdict() | training | {"kernel": describe(kernel)}


def study(
    workdir: Path, names: list[str], settings: Settings, stream: TextIO
) -> dict[str, dict[str, Any]]:
    """Return the results of each kernel, reusing those in `workdir`.

    {kernel: {"settings", "models": {model: {"train": [RMSE per seed], "test": […]}},
    "seconds", "cpu_seconds"}}
    """
    require_devices()
    names = list(dict.fromkeys(names))
    found = {name: _finished(workdir / f"{name}.json", settings.described(name)) for name in names}
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir {workdir}: cannot be created: {error.strerror}") from None
    missing = [name for name in names if found[name] is None]
    progress = _Progress(settings, len(missing), stream)
    for name in missing:
        found[name] = _regress(name, settings, progress)
        write_json(workdir / f"{name}.json", found[name])
    progress.clear()
    return found


def _regress(kernel: str, settings: Settings, progress: "_Progress") -> dict[str, Any]:
    """Fit all models to one kernel, each on the same functions, points and batches."""
    clocks = time.monotonic(), time.process_time()
    draws = [
        make_data(kernel, seed, settings.points, settings.test_points)
        for seed in range(settings.seeds)
    ]
    data = Data(*(np.stack(arrays) for arrays in zip(*draws, strict=True)))
    results = {}
    for name, model in MODELS.items():
        report = progress.of(kernel, name)
        errors = fit(model, data, settings.seeds, settings.steps, report)
        results[name] = {"train": errors.train.tolist(), "test": errors.test.tolist()}
    return {
        "settings": settings.described(kernel),
        "models": results,
        "seconds": round(time.monotonic() - clocks[0], 1),
        "cpu_seconds": round(time.process_time() - clocks[1], 1),
    }


def _finished(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the results that an earlier run left at `path`, or None.

    Raises UserError if the file is something else or was made with other settings.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        before, _ = dict(content["settings"]), content["models"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a kernel's results ({error}); remove it, or use another --workdir"
        ) from None
    if before == settings:
        return content
    changed = [key for key in settings if before.get(key) != settings[key]]
    there = ", ".join(f"{key} {before.get(key)} -> {settings[key]}" for key in changed)
    raise UserError(
        f"{path}: made with other settings (there -> now: {there}); use another --workdir or the "
        "same settings"
    )


class _Progress(ProgressLine):
    """The progress of the study, in which a model's steps count by their FLOPs.

    The time until a model's first report includes its compilation, which happens once for all
    kernels, so it is counted separately.
    """

    def __init__(self, settings: Settings, kernels: int, stream: TextIO):
        super().__init__(stream, every=15.0, at_once=True, clock=time.monotonic)
        self._costs = {name: sizes(model)["flops"] for name, model in MODELS.items()}
        self._total = kernels * sum(self._costs.values())
        self._steps = settings.steps
        self._done = self._measured = self._seconds = 0.0  # work in FLOPs per step
        self._starts: dict[str, float] = {}  # seconds until the first report of each model

    def of(self, kernel: str, model: str) -> Callable[[int], None]:
        """Return the callback for `fit`."""
        base, cost = self._done, self._costs[model] / self._steps
        mark = time.monotonic()

        def report(step: int) -> None:
            nonlocal mark
            now = time.monotonic()
            done = base + cost * step
            if model in self._starts:
                self._measured += done - self._done
                self._seconds += now - mark
            self._starts.setdefault(model, now - mark)
            self._done, mark = done, now
            if self.is_due():
                where = f"{KERNELS[kernel].title}  {MODELS[model].title}"
                self._show_step(f"{where}  step {step}/{self._steps}")

        return report

    def _show_step(self, where: str) -> None:
        parts = [where, f"{100 * self._done / self._total:.0f} %"]
        if self._measured:
            to_compile = np.mean(list(self._starts.values())) * (len(MODELS) - len(self._starts))
            left = (self._total - self._done) * self._seconds / self._measured + to_compile
            parts.append(f"ETA {format_duration(left)}")
        self.show(*parts)

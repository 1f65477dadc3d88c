"""The grid of runs that a figure compares: arms at each model size, learning rates and seeds.

A figure's file defines `get_sweep(size)`, which returns a `Sweep`; configs/paper/ has the paper's.
Runs with the same resolved configuration are one run, whichever figures they belong to.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict

from cem_jax.config import Config, flattened, leaves, load_config
from cem_jax.config.file import call_in_file, split_argument
from cem_jax.errors import UserError
from cem_jax.runs.resume import is_free

BASE = Path(__file__).resolve().parents[3] / "configs" / "base.py"
LEARNING_RATE = "optimizer.learning_rate"
SEEDS = ("seed", "data.shuffle_seed")

# The x axis of test perplexity: the number of parameters; the steps of recursion T; the
# learning rate; one place for each arm; one for each series, T = 1 beside T = 2; T at evaluation.
Plot = Literal["parameters", "steps", "learning_rate", "arms", "gain", "test_steps"]


@dataclass(frozen=True)
class Arm:
    """One model of a figure, at one size.

    Attributes:
      name: its name in the figure; the same at every size.
      config: all fields.
      series: the arms of a series share a colour; defaults to the name.
      x: its place on the x axis where that shows the steps of recursion.
    """

    name: str
    config: ConfigDict
    series: str = ""
    x: int | None = None


@dataclass(frozen=True)
class Sweep:
    """A figure.

    Attributes:
      name: `fig2c`.
      title: what is compared, in one line.
      plot: the kind of plot.
      arms: the arms of each size, by the size's name.
      files: the configuration that a size's arms are derived from, by the size's name.
      baseline: the arm that is drawn as a dashed line, or that others are linked to.
      rates: learning rates, as multiples of the one in the size's configuration.
      evaluate_steps: also evaluate with these numbers of recursion steps instead of the trained
        one; the baseline's layers have no recursion.
    """

    name: str
    title: str
    plot: Plot
    arms: Mapping[str, Sequence[Arm]]
    files: Mapping[str, str]
    baseline: str = "Llama"
    rates: Sequence[float] = (1.0,)
    evaluate_steps: Sequence[int] = ()


@dataclass(frozen=True)
class Run:
    """One training run of a grid.

    Attributes:
      size: the model size's name.
      config: resolved and checked.
      file: the configuration that it is derived from.
      uses: its places in figures.
      evaluate_steps: values of T to evaluate with instead of the trained one, for all its figures.
    """

    size: str
    config: Config
    file: str
    uses: tuple["Use", ...]
    evaluate_steps: tuple[int, ...] = ()

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def key(self) -> str:
        """Return a key that runs share if they differ only in their seeds."""
        return f"{self.size}-{identity(self.config)}"

    @property
    def name(self) -> str:
        """Return the name of its directory and row: readable and unique."""
        m, rate = self.config.model, self.config.optimizer.learning_rate
        kinds = f"{m.attention.kind}-t{m.attention.steps}-{m.mlp.kind}-t{m.mlp.steps}"
        return f"{self.size}-{kinds}-lr{rate:g}-{identity(self.config)}-seed{self.seed}"

    @property
    def label(self) -> str:
        """Return its first figure and its name there."""
        use = self.uses[0]
        rate = "" if use.rate == 1 else f", learning rate {self.config.optimizer.learning_rate:g}"
        return f"{use.figure}, {self.size}, {use.arm}{rate}, seed {self.seed}"


@dataclass(frozen=True)
class Use:
    """A run's place in a figure; `rate` is a multiple of the size's own learning rate."""

    figure: str
    arm: str
    rate: float


def identity(config: Config) -> str:
    """Hash what is trained into ten digits: all fields but seeds and those free on resuming.

    Only fields that differ from configs/base.py count, so fields added to it later change nothing.
    """
    default = defaults()
    trained = {n: v for n, v in leaves(config).items() if is_trained(n) and v != default[n]}
    return hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()[:10]


def is_trained(field: str) -> bool:
    """Return whether the dotted field changes the model or the data rather than the seed."""
    return field not in SEEDS and not is_free(field)


@functools.cache
def defaults() -> dict[str, Any]:
    """Return every field of configs/base.py by its dotted name."""
    return leaves(load_config(str(BASE)))


def read_sweep(path: str, size: str | None = None) -> Sweep:
    """Read the sweep of `file.py` or `file.py:size`; raise UserError if the file has a mistake.

    `size` is the argument where the path has none.
    """
    file, argument = split_argument(path)
    if size is not None:
        if argument and argument != [size]:
            raise UserError(f"{path}: --size {size} contradicts it; give one of them")
        path = f"{file}:{size}"

    def checked(sweep: Any) -> Sweep:
        if not isinstance(sweep, Sweep):
            raise UserError(f"{file}: get_sweep() must return a Sweep, not {type(sweep).__name__}")
        return sweep

    return call_in_file(path, "get_sweep", checked)


def at_rates(sweeps: Sequence[Sweep], rates: Sequence[float]) -> list[Sweep]:
    """Keep only these multiples of the learning rate. Raises UserError for one no sweep has."""
    known = sorted({rate for sweep in sweeps for rate in sweep.rates})
    problems = [
        f"--rates {rate:g}: no figure has it; there are {', '.join(f'{r:g}' for r in known)}"
        for rate in rates
        if rate not in known
    ]
    if problems:
        raise UserError(*problems)
    return [replace(sweep, rates=[r for r in sweep.rates if r in rates]) for sweep in sweeps]


def runs_of(
    sweeps: Sequence[Sweep],
    seeds: Sequence[int] = (0,),
    overrides: Sequence[tuple[str, Any]] = (),
) -> list[Run]:
    """Return every run of the sweeps once: all of the first seed, then of the next.

    `overrides` are (dotted field, text) pairs for all runs, as on the command line.
    Raises UserError with all mistakes in the runs, or for overrides of what is compared.
    """
    found: dict[str, Run] = {}
    problems = dict.fromkeys(p for sweep in sweeps for p in _override_problems(sweep, overrides))
    for seed in seeds:
        for sweep in sweeps:
            try:
                for run in _runs(sweep, seed, overrides):
                    found[run.name] = _merged(found.get(run.name), run)
            except UserError as error:
                problems |= dict.fromkeys(error.messages)
    if problems:
        raise UserError(*problems)
    return list(found.values())


def _runs(sweep: Sweep, seed: int, overrides: Sequence[tuple[str, Any]]) -> Iterator[Run]:
    for size, arms in sweep.arms.items():
        for arm in arms:
            steps = () if arm.name == sweep.baseline else tuple(sweep.evaluate_steps)
            for rate in sweep.rates:
                learning_rate = rate * arm.config.optimizer.learning_rate
                changes = [(LEARNING_RATE, learning_rate), *((name, seed) for name in SEEDS)]
                config = Config.from_dict(arm.config.to_dict(), [*changes, *overrides])
                use = Use(sweep.name, arm.name, rate)
                yield Run(size, config, sweep.files[size], (use,), steps)


def flag(field: str, value: Any) -> str:
    """Return the command-line override of the dotted field, not quoted for a shell."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"--config.{field}={text}"


def _merged(first: Run | None, second: Run) -> Run:
    if first is None:
        return second
    steps = sorted({*first.evaluate_steps, *second.evaluate_steps})
    return replace(first, uses=(*first.uses, *second.uses), evaluate_steps=tuple(steps))


def _override_problems(sweep: Sweep, overrides: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Return a message for each field that cannot be overridden because it is compared."""
    for name, _ in overrides:
        if name in SEEDS:
            yield f"{name}: a sweep sets it itself; --seeds N runs seeds 0 to N - 1"
        values = [
            {repr(flattened(arm.config.to_dict()).get(name)) for arm in arms}
            for arms in sweep.arms.values()
        ]
        several = name == LEARNING_RATE and len(sweep.rates) > 1
        if several or any(len(different) > 1 for different in values):
            yield f"{name}: {sweep.name} compares values of it; it cannot be set for all runs"

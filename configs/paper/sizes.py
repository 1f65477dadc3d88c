"""The model sizes that a figure is run at, by name."""

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import NamedTuple

from ml_collections import ConfigDict

from cem_jax.errors import UserError
from cem_jax.studies.figures.grid import Arm
from configs import llama_86m, llama_108m, llama_134m, llama_162m, llama_256m
from configs.paper import ladder, mini


class Size(NamedTuple):
    """The Llama that a size's arms are derived from: its file, as for --config, and its maker."""

    file: str
    llama: Callable[[], ConfigDict]


def _of(module: ModuleType) -> Size:
    return Size(module.__file__, module.get_config)


PAPER = {
    "86m": _of(llama_86m),
    "108m": _of(llama_108m),
    "134m": _of(llama_134m),
    "162m": _of(llama_162m),
}
SMALLEST = {"86m": PAPER["86m"]}
LARGER = {"256m": _of(llama_256m)}  # Figure 5's, our guess
MINI = {"mini": _of(mini)}
LADDER = {
    size: Size(f"{ladder.__file__}:{size}", partial(ladder.get_config, size))
    for size in ladder.SIZES
}
EVERY = PAPER | LARGER | MINI | LADDER


def at(
    name: str,
    arms: Callable[[ConfigDict], Iterable[Arm]],
    paper: dict[str, Size] = PAPER,
) -> dict[str, dict]:
    """Return the fields of a Sweep that follow from its sizes: files, and arms made from Llamas.

    `name` is `paper` for the sizes in the paper's figure, `ladder`, or the name of one size.
    """
    groups = {"paper": paper, "ladder": LADDER}
    if name not in groups and name not in EVERY:
        known = ", ".join([*groups, *EVERY])
        raise UserError(f"size {name}: no such size; there are {known}")
    sizes = groups.get(name) or {name: EVERY[name]}
    return {
        "files": {name: size.file for name, size in sizes.items()},
        "arms": {name: list(arms(size.llama())) for name, size in sizes.items()},
    }

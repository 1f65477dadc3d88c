"""The model sizes that a figure is run at, by name."""

from collections.abc import Callable, Iterable
from types import ModuleType

from ml_collections import ConfigDict

from cem_jax.errors import UserError
from cem_jax.studies.figures.grid import Arm
from configs import llama_86m, llama_108m, llama_134m, llama_162m, llama_256m
from configs.paper import mini

PAPER = {"86m": llama_86m, "108m": llama_108m, "134m": llama_134m, "162m": llama_162m}
SMALLEST = {"86m": llama_86m}
LARGER = {"256m": llama_256m}  # Figure 5's, a guess of ours
EVERY = PAPER | LARGER | {"mini": mini}


def sizes(name: str, paper: dict[str, ModuleType] = PAPER) -> dict[str, ModuleType]:
    """`paper`: the sizes the paper's figure has; any other name: that size alone."""
    if name == "paper":
        return paper
    if name not in EVERY:
        raise UserError(f"size {name}: no such size; there are paper, {', '.join(EVERY)}")
    return {name: EVERY[name]}


def at(
    sizes: dict[str, ModuleType], arms: Callable[[ConfigDict], Iterable[Arm]]
) -> dict[str, dict]:
    """What a Sweep needs to know of its sizes: their files, and the arms made from their Llamas."""
    return {
        "files": {name: module.__file__ for name, module in sizes.items()},
        "arms": {name: list(arms(module.get_config())) for name, module in sizes.items()},
    }

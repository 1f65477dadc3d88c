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


def at(
    name: str,
    arms: Callable[[ConfigDict], Iterable[Arm]],
    paper: dict[str, ModuleType] = PAPER,
) -> dict[str, dict]:
    """The fields of a Sweep that follow from its sizes: their files, and arms made from Llamas.

    `name` is `paper`, for the sizes that the paper's figure has, or that of one size.
    """
    if name != "paper" and name not in EVERY:
        raise UserError(f"size {name}: no such size; there are paper, {', '.join(EVERY)}")
    sizes = paper if name == "paper" else {name: EVERY[name]}
    return {
        "files": {size: llama.__file__ for size, llama in sizes.items()},
        "arms": {size: list(arms(llama.get_config())) for size, llama in sizes.items()},
    }

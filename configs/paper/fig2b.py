"""Figure 2b: Llama with its gated MLPs replaced by CEM MLPs of one step.

    cem sweep --config configs/paper/fig2b.py --workdir runs/paper --config.data.path=DATA
    cem sweep --config configs/paper/fig2b.py:mini --workdir runs/mini --config.data.path=DATA

At the width M of the MLP it replaces a CEM MLP has two thirds of its parameters, at 1.5 M as many.
No preconditioner. Equal tokens at each size. Test perplexity over parameters.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="fig2b",
        title="MLPs replaced by CEM MLPs, T = 1",
        plot="parameters",
        **sizes.at(size, arms_of),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    yield Arm("CEM MLP", models.cem_mlp(llama))
    yield Arm("CEM MLP, 1.5 M", models.cem_mlp(llama, width=1.5))

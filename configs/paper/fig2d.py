"""Figure 2d: steps of recursion and preconditioners in CEM MLPs.

    cem sweep --config configs/paper/fig2d.py --workdir runs/paper --config.data.path=DATA
    cem sweep --config configs/paper/fig2d.py:mini --workdir runs/mini --config.data.path=DATA

T = 1 and 2 (x axis) with no preconditioner, a diagonal one, and one with a part of rank 16 besides
(colours), in a Llama whose MLPs are replaced, at equal width. The dashed line is Llama.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="fig2d",
        title="Recursion and preconditioners in CEM MLPs",
        plot="steps",
        **sizes.at(size, arms_of),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    for preconditioner in models.PRECONDITIONERS:
        for steps in (1, 2):
            model = models.cem_mlp(llama, steps=steps, preconditioner=preconditioner)
            series = models.PRECONDITIONERS[preconditioner]
            yield Arm(f"T = {steps}, {series}", model, series, steps)

"""Beyond the paper: full CEM trained with T = 1 to 4 steps.

    cem sweep --config configs/paper/ours_steps.py --workdir runs/paper --config.data.path=DATA

The paper saw no consistent gain from T ≥ 3. Both sublayers, diagonal and low-rank preconditioners.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="ours_steps",
        title="Steps of recursion in full CEM",
        plot="steps",
        **sizes.at(size, arms_of, sizes.SMALLEST),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    for steps in (1, 2, 3, 4):
        yield Arm(f"T = {steps}", models.full_cem(llama, steps=steps), "CEM", steps)

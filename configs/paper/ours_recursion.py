"""Beyond the paper: does a second step pay, each arm at its best learning rate?

    cem sweep --config configs/paper/ours_recursion.py --workdir runs/ladder --config.data.path=DATA
    cem sweep --config configs/paper/ours_recursion.py:0.3m --workdir runs/ladder \\
        --config.data.path=DATA

At the ladder's sizes by default. CEM attention, CEM MLPs, and both, without
preconditioners, with T = 1 and 2. A comparison at one learning rate misleads, since the best one
differs between arms: five, from a quarter to four times the size's own.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "ladder") -> Sweep:
    return Sweep(
        name="ours_recursion",
        title="Does a second step pay?",
        plot="learning_rate",
        **sizes.at(size, arms_of, sizes.SMALLEST),
        rates=(1 / 4, 1 / 2, 1, 2, 4),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    for steps in (1, 2):
        yield Arm(f"CEM attention, T = {steps}", models.cem_attention(llama, steps=steps))
    for steps in (1, 2):
        yield Arm(f"CEM MLP, T = {steps}", models.cem_mlp(llama, steps=steps))
    for steps in (1, 2):
        both = models.cem_mlp(models.cem_attention(llama, steps=steps), steps=steps)
        yield Arm(f"both, T = {steps}", both)

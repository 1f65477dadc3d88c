"""Figure 5: Figure 3a at 256M, CEM with two more layers.

    cem sweep --config configs/paper/fig5.py --workdir runs/paper --config.data.path=DATA
    cem sweep --config configs/paper/fig5.py:mini --workdir runs/mini --config.data.path=DATA

The paper names no dimensions for this size; configs/llama_256m.py is our guess.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="fig5",
        title="Learning rates of Llama and full CEM, two more layers",
        plot="learning_rate",
        **sizes.at(size, arms_of, sizes.LARGER),
        rates=(1 / 4, 1 / 2, 1, 2, 4),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    cem = models.full_cem(llama)
    cem.model.layers += 2
    yield Arm("CEM, T = 2", cem)

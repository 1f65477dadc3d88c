"""Figure 3a: the best learning rate of Llama and of full CEM.

    cem sweep --config configs/paper/fig3a.py --workdir runs/paper --config.data.path=DATA
    cem sweep --config configs/paper/fig3a.py:mini --workdir runs/mini --config.data.path=DATA

Both sublayers replaced, T = 2, diagonal and low-rank preconditioners. Five learning rates, from a
quarter to four times Table 2's 0.002. Test perplexity over the learning rate, Akima's interpolation
between the five, a star at its optimum.
The paper leaves out full CEM at its largest size, for memory; it is here.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="fig3a",
        title="Learning rates of Llama and full CEM",
        plot="learning_rate",
        **sizes.at(size, arms_of),
        rates=(1 / 4, 1 / 2, 1, 2, 4),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    yield Arm("CEM, T = 2", models.full_cem(llama))

"""Figure 4: recursion within CEM attention against plain reuse of attention.

    cem sweep --config configs/paper/fig4.py --workdir runs/paper --config.data.path=DATA
    cem sweep --config configs/paper/fig4.py:mini --workdir runs/mini --config.data.path=DATA

The gain from one pass to two in two settings: Llama's attention sublayer applied once and twice
with the same weights; CEM attention with T = 1 and 2. No preconditioner.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="fig4",
        title="Recursion in CEM attention against plain reuse",
        plot="gain",
        **sizes.at(size, arms_of),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    for steps in (1, 2):
        name = "Llama" if steps == 1 else "plain reuse, twice"
        yield Arm(name, models.reuse_attention(llama, steps), "plain reuse", steps)
        model = models.cem_attention(llama, steps=steps)
        yield Arm(f"CEM attention, T = {steps}", model, "CEM attention", steps)

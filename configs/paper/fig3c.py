"""Figure 3c: recursion within CEM MLPs against plain reuse of gated MLPs.

    cem sweep --config configs/paper/fig3c.py --workdir runs/paper --config.data.path=DATA
    cem sweep --config configs/paper/fig3c.py:mini --workdir runs/mini --config.data.path=DATA

The gain from one pass to two in three settings: Llama's MLP sublayer applied once and twice with
the same weights; CEM MLPs with T = 1 and 2 at Llama's width M; the same at 1.5 M, which has as many
parameters as Llama.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="fig3c",
        title="Recursion in CEM MLPs against plain reuse",
        plot="gain",
        **sizes.at(size, arms_of),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    for steps in (1, 2):
        name = "Llama" if steps == 1 else "plain reuse, twice"
        yield Arm(name, models.reuse_mlp(llama, steps), "plain reuse", steps)
        yield Arm(f"CEM MLP, T = {steps}", models.cem_mlp(llama, steps=steps), "CEM MLP", steps)
        wider = models.cem_mlp(llama, steps=steps, width=1.5)
        yield Arm(f"CEM MLP, 1.5 M, T = {steps}", wider, "CEM MLP, 1.5 M", steps)

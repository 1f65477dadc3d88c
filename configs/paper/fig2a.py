"""Figure 2a: Llama with its attention replaced by CEM attention of one step.

    cem sweep --config configs/paper/fig2a.py --workdir runs/paper --config.data.path=DATA
    cem sweep --config configs/paper/fig2a.py:mini --workdir runs/mini --config.data.path=DATA

CEM attention has the dimensions of the attention it replaces and about half its parameters; no
preconditioner, with and without the diagonal that the heads share. Equal tokens at each size.
Test perplexity over parameters, each CEM model linked to its Llama.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="fig2a",
        title="Attention replaced by CEM attention, T = 1",
        plot="parameters",
        **sizes.at(size, arms_of),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    yield Arm("CEM attention", models.cem_attention(llama))
    yield Arm("CEM attention, no diagonal", models.cem_attention(llama, diagonal="none"))

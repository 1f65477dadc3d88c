"""Figure 3b: the diagonal of the key-query matrix in CEM attention.

    cem sweep --config configs/paper/fig3b.py --workdir runs/paper --config.data.path=DATA
    cem sweep --config configs/paper/fig3b.py:mini --workdir runs/mini --config.data.path=DATA

A_k = diag(d) + W_Qᵀ W_K without the diagonal, with one that the heads share, and with one per
head. T = 1, diagonal preconditioner, Llama's MLPs. The dashed line is Llama.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="fig3b",
        title="The diagonal in CEM attention, T = 1",
        plot="arms",
        **sizes.at(size, arms_of),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    for diagonal, name in (("none", "none"), ("shared", "shared"), ("per_head", "per head")):
        model = models.cem_attention(llama, diagonal=diagonal, preconditioner="diagonal")
        yield Arm(name, model)

"""Beyond the paper: the diagonal's own gradient in the update.

    cem sweep --config configs/paper/ours_gradient.py --workdir runs/paper --config.data.path=DATA

Algorithm 1 leaves it out. T = 2, Llama's MLPs, without a preconditioner and with one for all heads.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="ours_gradient",
        title="Algorithm 1 against the exact gradient, T = 2",
        plot="arms",
        **sizes.at(size, arms_of, sizes.SMALLEST),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    one = {"preconditioner": "diagonal", "preconditioner_heads": "shared"}
    for p, fields in (("no P", {}), ("one P", one)):
        for name, exact in (("Algorithm 1", False), ("exact", True)):
            model = models.cem_attention(llama, steps=2, diagonal_in_update=exact, **fields)
            yield Arm(f"{name}, {p}", model, name)

"""Beyond the paper: where the gradient is taken, and which stream it moves.

    cem sweep --config configs/paper/ours_norm.py --workdir runs/paper --config.data.path=DATA

Full CEM, T = 2: the gradient at u = RMSNorm(x), which is the paper's; scaled by the norm's weight;
through the norm. And Algorithm 1 as printed, where x itself becomes RMSNorm(x).
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="ours_norm",
        title="Norms in full CEM, T = 2",
        plot="arms",
        **sizes.at(size, arms_of, sizes.SMALLEST),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    yield Arm("gradient at u", models.full_cem(llama))
    for gradient, name in (("scaled", "scaled"), ("full", "through the norm")):
        model = models.full_cem(llama)
        model.model.norm_gradient = gradient
        yield Arm(name, model)
    model = models.full_cem(llama)
    model.model.residual = "normalized"
    yield Arm("normalized stream", model)

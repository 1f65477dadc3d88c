"""Beyond the paper: the step size η of the second step.

    cem sweep --config configs/paper/ours_step_size.py --workdir runs/paper --config.data.path=DATA

The paper's η is 1 for every T, so that two steps move the stream twice as far. One sublayer is
CEM, without a preconditioner: T = 1 against T = 2 with η = 1, with η = 1/2, and with η learned.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="ours_step_size",
        title="The step size of CEM attention and of CEM MLPs",
        plot="arms",
        **sizes.at(size, arms_of, sizes.SMALLEST),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    for sublayer, replace in (("attention", models.cem_attention), ("mlp", models.cem_mlp)):
        for name, steps, fields in (
            ("T = 1", 1, {}),
            ("T = 2", 2, {}),
            ("T = 2, η = 1/2", 2, {"step_size": 0.5}),
            ("T = 2, η learned", 2, {"learn_step_size": True}),
        ):
            model = replace(llama, steps=steps)
            model.model[sublayer].update(fields)
            yield Arm(f"{sublayer}, {name}", model, sublayer)

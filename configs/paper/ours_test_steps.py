"""Beyond the paper: full CEM trained with T = 2, evaluated with T = 1 to 8.

    cem sweep --config configs/paper/ours_test_steps.py --workdir runs/paper --config.data.path=DATA

The paper leaves scaling at test time to future work. T is not a parameter, so one trained model is
enough.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="ours_test_steps",
        title="Steps at evaluation of full CEM trained with T = 2",
        plot="test_steps",
        **sizes.at(size, arms_of, sizes.SMALLEST),
        evaluate_steps=(1, 2, 3, 4, 6, 8),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    yield Arm("CEM, trained with T = 2", models.full_cem(llama))

"""Beyond the paper: rotary positions in CEM attention, against ALiBi.

    cem sweep --config configs/paper/ours_position.py --workdir runs/paper --config.data.path=DATA

The paper drops rotary positions since values would depend on the query. With rotated keys as values
and one rotation back they do not (docs/mathematics.md). T = 2, no preconditioner, Llama's MLPs.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from cem_jax.studies.figures.grid import Arm, Sweep
from configs import models
from configs.paper import sizes


def get_sweep(size: str = "paper") -> Sweep:
    return Sweep(
        name="ours_position",
        title="Positions in CEM attention, T = 2",
        plot="arms",
        **sizes.at(size, arms_of, sizes.SMALLEST),
    )


def arms_of(llama: ConfigDict) -> Iterator[Arm]:
    yield Arm("Llama", llama)
    for position, name in (("alibi", "ALiBi"), ("rope", "rotary")):
        yield Arm(name, models.cem_attention(llama, steps=2, position=position))

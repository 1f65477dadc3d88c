"""Four Llamas of 0.26M to 2.64M parameters at 20 tokens per parameter: size "ladder".

    cem tokenizer --input CORPUS/train --output study1k.model --vocab-size 1024
    cem prepare --input CORPUS --tokenizer study1k.model --output DATASET
    cem train --config configs/paper/ladder.py:0.3m --config.data.path=DATASET --workdir runs/ladder
    cem sweep --config configs/paper/ours_recursion.py --size ladder --workdir runs/ladder \\
        --config.data.path=DATASET

A figure can be run at all four (`--size ladder`) or at one of them (`--size 0.3m`).

A run of Llama on one idle core takes 3 to 4 minutes at 0.3m. By FLOPs the others take 6, 26 and 107
times as long: about 20 minutes at 0.6m, 1.5 hours at 1.3m and 6 hours at 2.6m. CEM attention and a
CEM MLP of two steps each cost up to 1.4 times Llama's FLOPs, both of them up to 1.7 times.

Learning rates: a figure's multiples are of 0.004 at every size. Whether that is near Llama's best
at all of them follows from its best rates at 0.3m and 2.6m, which have not been measured yet.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from configs import models


class Shape(NamedTuple):
    """The dimensions of a Llama: D, layers, K and M."""

    dim: int
    layers: int
    heads: int
    hidden: int


SIZES = {
    "0.3m": Shape(48, 6, 4, 128),
    "0.6m": Shape(72, 8, 6, 192),
    "1.3m": Shape(96, 10, 8, 256),
    "2.6m": Shape(128, 12, 8, 344),
}


def get_config(size: str = "0.3m") -> ConfigDict:
    shape = SIZES[size]
    c = models.small_llama(**shape._asdict(), vocab_size=1024)
    # A sublayer's initial output grows with init_std² D; keep it as at D = 672, the paper's.
    c.model.init_std = round(0.02 * (672 / shape.dim) ** 0.5, 3)
    c.optimizer.learning_rate = 0.004
    c.train.global_batch = 16
    return c

"""Full CEM at the size of a 1.3B Llama (882,313,600 parameters here), T = 2 in both sublayers.

    cem train --config configs/scale/cem_1b3.py --config.data.path=DATASET --workdir runs/cem_1b3

Not in the paper: the next size to run. 25,662 steps of 512 sequences of 2048 tokens: 20 for each
parameter of the Llama twin. The learning rate is not tuned. Parameters and optimizer are split over
all devices (mesh.fsdp). See docs/scaling.md for what fits where.
"""

import ml_collections

from configs.scale import llama_1b3


def get_config() -> ml_collections.ConfigDict:
    c = llama_1b3.get_config()

    c.model.attention.kind = "cem"
    c.model.attention.steps = 2
    c.model.attention.diagonal = "shared"
    c.model.attention.position = "alibi"
    c.model.attention.self_bias = True
    c.model.attention.preconditioner = "diagonal_low_rank"
    c.model.attention.preconditioner_rank = 4

    c.model.mlp.kind = "cem"
    c.model.mlp.steps = 2
    c.model.mlp.preconditioner = "diagonal_low_rank"
    c.model.mlp.preconditioner_rank = 16
    return c

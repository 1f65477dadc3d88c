"""Full CEM at the size of a 7B Llama (4,264,039,424 parameters here), T = 2 in both sublayers.

    cem train --config configs/scale/cem_7b.py --config.data.path=DATASET --workdir runs/cem_7b

Not in the paper: the next size to run. 32,131 steps of 1024 sequences of 4096 tokens: 20 for each
parameter of the Llama twin. The learning rate is not tuned. Parameters and optimizer are split over
all devices (mesh.fsdp). See docs/scaling.md for what fits where.
"""

import ml_collections

from configs.scale import llama_7b


def get_config() -> ml_collections.ConfigDict:
    c = llama_7b.get_config()

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

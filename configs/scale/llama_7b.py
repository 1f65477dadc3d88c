"""Llama baseline of 7B parameters (6,738,415,616). Not in the paper: the next size to run.

    cem train --config configs/scale/llama_7b.py --config.data.path=DATASET --workdir runs/llama_7b

32,131 steps of 1024 sequences of 4096 tokens: 20 tokens a parameter. The learning rate is not
tuned. Parameters and optimizer are split over all devices (mesh.fsdp). See docs/scaling.md for what
fits where.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    c = base.get_config()
    c.model.dim = 4096
    c.model.layers = 32
    c.model.remat = "attention"

    c.model.attention.kind = "llama"
    c.model.attention.heads = 32
    c.model.attention.steps = 1
    c.model.attention.position = "rope"
    c.model.attention.self_bias = False

    c.model.mlp.kind = "gated"
    c.model.mlp.dim = 11008
    c.model.mlp.steps = 1

    c.data.context = 4096
    c.optimizer.learning_rate = 0.0005

    c.train.tokens = 20 * base.llama_parameters(c)
    c.train.global_batch = 1024
    c.train.microbatch = 64

    c.mesh.data = 1
    c.mesh.fsdp = -1
    return c

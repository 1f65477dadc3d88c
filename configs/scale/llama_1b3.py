"""Llama baseline of 1.3B parameters (1,345,423,360). Not in the paper: the next size to run.

    cem train --config configs/scale/llama_1b3.py --config.data.path=DATASET --workdir runs/llama

25,662 steps of 512 sequences of 2048 tokens: 20 tokens a parameter. The learning rate is not
tuned. Parameters and optimizer are split over all devices (mesh.fsdp). See docs/scaling.md for what
fits where.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    c = base.get_config()
    c.model.dim = 2048
    c.model.layers = 24
    c.model.remat = "attention"

    c.model.attention.kind = "llama"
    c.model.attention.heads = 16
    c.model.attention.steps = 1
    c.model.attention.position = "rope"
    c.model.attention.self_bias = False

    c.model.mlp.kind = "gated"
    c.model.mlp.dim = 5504
    c.model.mlp.steps = 1

    c.data.context = 2048
    c.optimizer.learning_rate = 0.001

    c.train.tokens = 20 * base.llama_parameters(c)
    c.train.global_batch = 512
    c.train.microbatch = 128

    c.mesh.data = 1
    c.mesh.fsdp = -1
    return c

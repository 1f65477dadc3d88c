"""Llama baseline of 1.3B parameters (1,345,423,360). Not in the paper: the next size to run.

    cem train --config configs/scale/llama_1b3.py --config.data.path=DATASET --workdir runs/llama

25,662 steps of 512 sequences of 2048 tokens: 20 tokens per parameter. The learning rate is not
tuned. Parameters and optimizer are split over all devices (mesh.fsdp). See docs/scaling.md for what
fits where.
"""

from ml_collections import ConfigDict

from configs import models


def get_config() -> ConfigDict:
    c = models.llama(dim=2048, layers=24, heads=16, hidden=5504)
    c.model.remat = "attention"
    c.data.context = 2048
    c.optimizer.learning_rate = 0.001
    c.train.update(global_batch=512, microbatch=128)
    c.mesh.update(data=1, fsdp=-1)
    return c

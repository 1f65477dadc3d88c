"""Llama baseline of 7B parameters (6,738,415,616). Not in the paper: the next size to run.

    cem train --config configs/scale/llama_7b.py --config.data.path=DATASET --workdir runs/llama_7b

32,131 steps of 1024 sequences of 4096 tokens: 20 tokens per parameter. The learning rate is not
tuned. Parameters and optimizer are split over all devices (mesh.fsdp). See docs/scaling.md for what
fits where.
"""

from ml_collections import ConfigDict

from configs import models


def get_config() -> ConfigDict:
    c = models.llama(dim=4096, layers=32, heads=32, hidden=11008)
    c.model.remat = "attention"
    c.data.context = 4096
    c.optimizer.learning_rate = 0.0005
    c.train.update(global_batch=1024, microbatch=64)
    c.mesh.update(data=1, fsdp=-1)
    return c

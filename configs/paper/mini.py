"""The Llama from which the figures' arms are derived at size "mini": minutes on a CPU.

    cem train --config configs/paper/mini.py --config.data.path=DATASET --workdir runs/mini

DATASET is a directory written by `cem prepare` with a tokenizer of at most 2,048 pieces and splits
train and test. 836,448 parameters; 2M tokens, far from the paper's 20 per parameter, so that it
can be trained a few dozen times on a laptop.

A sublayer's initial output grows with init_std² D. 0.02 at D = 96 would make it a seventh of
that at D = 672, the paper's smallest; init_std √D is the same here as there.
"""

from ml_collections import ConfigDict

from configs import models


def get_config() -> ConfigDict:
    c = models.small_llama(dim=96, layers=4, heads=4, hidden=256, vocab_size=2048)
    c.model.init_std = 0.053  # 0.02 √(672/96)
    c.train.tokens = 2_000_000
    c.train.global_batch = 8
    return c

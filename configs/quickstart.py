"""A small full CEM model for a laptop: what `make demo` trains, on the standard library's sources.

    cem train --config configs/quickstart.py --config.data.path=DATASET --workdir runs/quickstart

DATASET is a directory written by `cem prepare` with a tokenizer of at most 4,096 pieces.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    c = base.get_config()
    c.model.vocab_size = 4096
    c.model.dim = 128
    c.model.layers = 3
    c.model.scan_layers = False

    c.model.attention.heads = 4
    c.model.attention.steps = 2

    c.model.mlp.dim = 344
    c.model.mlp.steps = 2

    c.data.context = 128

    c.optimizer.learning_rate = 0.006
    c.optimizer.final_fraction = 0.02

    c.train.steps = 2400
    c.train.global_batch = 8  # many small ones: there is only time for 2.5M tokens
    c.train.compute_dtype = "float32"

    c.checkpoint.every = 800
    c.eval.every = 800
    return c

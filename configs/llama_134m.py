"""Llama baseline of 134M parameters (134,105,856): Table 1, trained as in Table 2.

    cem train --config configs/llama_134m.py --config.data.path=DATASET --workdir runs/llama_134m

DATASET is a directory written by `cem prepare`; the paper's is SlimPajama with Llama's tokenizer.
10,231 steps of 128 sequences of 2048 tokens: 20 tokens a parameter.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    c = base.get_config()
    c.model.dim = 768
    c.model.layers = 12
    c.model.remat = "attention"  # recompute the rest: all sizes then fit a chip of 16 GiB

    c.model.attention.kind = "llama"
    c.model.attention.heads = 12
    c.model.attention.steps = 1
    c.model.attention.position = "rope"
    c.model.attention.self_bias = False

    c.model.mlp.kind = "gated"
    c.model.mlp.dim = 2048
    c.model.mlp.steps = 1

    c.train.tokens = 20 * base.llama_parameters(c)
    c.train.microbatch = 32  # four to an update, as in Table 2
    return c

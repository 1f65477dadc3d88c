"""Llama baseline of 256M parameters (254,957,472) for Figure 5: sizes of ours, see below.

    cem train --config configs/llama_256m.py --config.data.path=DATASET --workdir runs/llama_256m

The paper does not say which model its 256M is. Width, depth and MLP here are our guess: Table 1
continued to a total near 256M. All else is Table 2's.
DATASET is a directory written by `cem prepare`; the paper's is SlimPajama with Llama's tokenizer.
19,452 steps of 128 sequences of 2048 tokens: 20 tokens a parameter.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    c = base.get_config()
    c.model.dim = 1056
    c.model.layers = 14
    c.model.remat = "attention"  # recompute the rest, as at the smaller sizes

    c.model.attention.kind = "llama"
    c.model.attention.heads = 12
    c.model.attention.steps = 1
    c.model.attention.position = "rope"
    c.model.attention.self_bias = False

    c.model.mlp.kind = "gated"
    c.model.mlp.dim = 2816
    c.model.mlp.steps = 1

    c.train.tokens = 20 * base.llama_parameters(c)
    c.train.microbatch = 32  # four to an update, as in Table 2
    return c

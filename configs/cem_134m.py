"""Full CEM at the size of the 134M Llama (102,384,528 parameters here), T = 2 in both sublayers.

    cem train --config configs/cem_134m.py --config.data.path=DATASET --workdir runs/cem_134m

Diagonal shared by the heads, self bias, per-head P of rank 4 in attention, P of rank 16 in the MLP.
DATASET is a directory written by `cem prepare`; the paper's is SlimPajama with Llama's tokenizer.
10,231 steps of 128 sequences of 2048 tokens: 20 for each parameter of the Llama twin.
"""

import ml_collections

from configs import base, llama_134m


def get_config() -> ml_collections.ConfigDict:
    c = base.get_config()
    c.model.dim = 768
    c.model.layers = 12
    c.model.remat = "attention"  # recompute the rest: all sizes then fit a chip of 16 GiB

    c.model.attention.kind = "cem"
    c.model.attention.heads = 12
    c.model.attention.steps = 2
    c.model.attention.diagonal = "shared"
    c.model.attention.position = "alibi"
    c.model.attention.self_bias = True
    c.model.attention.preconditioner = "diagonal_low_rank"
    c.model.attention.preconditioner_rank = 4

    c.model.mlp.kind = "cem"
    c.model.mlp.dim = 2048
    c.model.mlp.steps = 2
    c.model.mlp.preconditioner = "diagonal_low_rank"
    c.model.mlp.preconditioner_rank = 16

    c.train.tokens = 20 * base.llama_parameters(llama_134m.get_config())
    c.train.microbatch = 32  # four to an update, as in Table 2
    return c

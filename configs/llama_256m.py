"""Llama baseline of 256M parameters (254,957,472) for Figure 5, with sizes of our own, see below.

    cem train --config configs/llama_256m.py --config.data.path=DATASET --workdir runs/llama_256m

The paper does not say which model its 256M is. Width, depth and MLP here are our guess: Table 1
continued to a total near 256M. Everything else is as in Table 2.
DATASET is a directory written by `cem prepare`; the paper's is SlimPajama with Llama's tokenizer.
19,452 steps of 128 sequences of 2048 tokens: 20 tokens per parameter.
"""

from ml_collections import ConfigDict

from configs import models


def get_config() -> ConfigDict:
    return models.paper_llama(dim=1056, layers=14, heads=12, hidden=2816)

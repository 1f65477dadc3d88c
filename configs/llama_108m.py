"""Llama baseline of 108M parameters (108,052,896): Table 1, trained as in Table 2.

    cem train --config configs/llama_108m.py --config.data.path=DATASET --workdir runs/llama_108m

DATASET is a directory written by `cem prepare`; the paper's is SlimPajama with Llama's tokenizer.
8,244 steps of 128 sequences of 2048 tokens: 20 tokens per parameter.
Between the 8 × 2 A100-hours that the paper reports for 86m and the 8 × 18 for 162m.
Its test perplexity is in the paper's Figure 2, as a picture only.
"""

from ml_collections import ConfigDict

from configs import models


def get_config() -> ConfigDict:
    return models.paper_llama(dim=672, layers=12, heads=12, hidden=1792)

"""Llama baseline of 162M parameters (162,813,024): Table 1, trained as in Table 2.

    cem train --config configs/llama_162m.py --config.data.path=DATASET --workdir runs/llama_162m

DATASET is a directory written by `cem prepare`; the paper's is SlimPajama with Llama's tokenizer.
12,422 steps of 128 sequences of 2048 tokens: 20 tokens per parameter.
The paper reports about 8 × 18 A100-hours for its models of this size.
Its test perplexity is in the paper's Figure 2, as a picture only.
"""

from ml_collections import ConfigDict

from configs import models


def get_config() -> ConfigDict:
    return models.paper_llama(dim=864, layers=12, heads=12, hidden=2304)

"""Full CEM at the size of the 108M Llama (83,909,424 parameters here), T = 2 in both sublayers.

    cem train --config configs/cem_108m.py --config.data.path=DATASET --workdir runs/cem_108m

Diagonal shared by the heads, self bias, per-head P of rank 4 in attention, P of rank 16 in the MLP.
DATASET is a directory written by `cem prepare`; the paper's is SlimPajama with Llama's tokenizer.
8,244 steps of 128 sequences of 2048 tokens: 20 per parameter of the Llama twin.
Between the 8 × 2 A100-hours that the paper reports for 86m and the 8 × 18 for 162m.
Its test perplexity is in the paper's Figure 3a, as a picture only.
"""

from ml_collections import ConfigDict

from configs import llama_108m, models


def get_config() -> ConfigDict:
    return models.full_cem(llama_108m.get_config())

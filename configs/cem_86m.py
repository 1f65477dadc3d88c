"""Full CEM at the size of the 86M Llama (70,082,272 parameters here), T = 2 in both sublayers.

    cem train --config configs/cem_86m.py --config.data.path=DATASET --workdir runs/cem_86m

Diagonal shared by the heads, self bias, per-head P of rank 4 in attention, P of rank 16 in the MLP.
DATASET is a directory written by `cem prepare`; the paper's is SlimPajama with Llama's tokenizer.
6,590 steps of 128 sequences of 2048 tokens: 20 per parameter of the Llama twin.
The paper reports about 8 × 2 A100-hours for its models of this size.
Its test perplexity is in the paper's Figure 3a, as a picture only.
"""

from ml_collections import ConfigDict

from configs import llama_86m, models


def get_config() -> ConfigDict:
    return models.full_cem(llama_86m.get_config())

"""Full CEM at the size of a 1.3B Llama (882,313,600 parameters here), T = 2 in both sublayers.

    cem train --config configs/scale/cem_1b3.py --config.data.path=DATASET --workdir runs/cem_1b3

Not in the paper: the next size to run. 25,662 steps of 512 sequences of 2048 tokens: 20 per
parameter of the Llama twin. The learning rate is not tuned. Parameters and optimizer are split over
all devices (mesh.fsdp). See docs/scaling.md for what fits where.
"""

from ml_collections import ConfigDict

from configs import models
from configs.scale import llama_1b3


def get_config() -> ConfigDict:
    return models.full_cem(llama_1b3.get_config())

"""Full CEM at the size of a 7B Llama (4,264,039,424 parameters here), T = 2 in both sublayers.

    cem train --config configs/scale/cem_7b.py --config.data.path=DATASET --workdir runs/cem_7b

Not in the paper: the next size to run. 32,131 steps of 1024 sequences of 4096 tokens: 20 per
parameter of the Llama twin. The learning rate is not tuned. Parameters and optimizer are split over
all devices (mesh.fsdp). See docs/scaling.md for what fits where.
"""

from ml_collections import ConfigDict

from configs import models
from configs.scale import llama_7b


def get_config() -> ConfigDict:
    return models.full_cem(llama_7b.get_config())

"""The layers and the decoder as Flax NNX modules, which own parameters; `energy` has the maths."""

from cem_jax.model.attention import CEMAttention
from cem_jax.model.llama import GatedMLP, LlamaAttention
from cem_jax.model.mlp import CEMMLP
from cem_jax.model.transformer import Block, Transformer

__all__ = ["CEMMLP", "Block", "CEMAttention", "GatedMLP", "LlamaAttention", "Transformer"]

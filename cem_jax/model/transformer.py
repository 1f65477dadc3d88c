"""The decoder: embedding, blocks of an attention and an MLP sublayer, final norm, output head.

The blocks' parameters are stacked, [L, …], and one compiled block scans over them.

Shapes: B batch · J positions · N new positions · D model dim · V vocabulary · L layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from cem_jax.config import ModelConfig
from cem_jax.energy import rms_norm
from cem_jax.kernels import OUTPUT
from cem_jax.model.attention import CEMAttention
from cem_jax.model.llama import GatedMLP, LlamaAttention
from cem_jax.model.mlp import CEMMLP
from cem_jax.model.parameters import matrix, norm_weight, with_values
from cem_jax.sharding.layout import lay_out, whole_rows
from cem_jax.sharding.linear import project

ATTENTION = {"cem": CEMAttention, "llama": LlamaAttention}
MLP = {"cem": CEMMLP, "gated": GatedMLP}


class Block(nnx.Module):
    """An attention sublayer, then an MLP sublayer."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = ATTENTION[config.attention.kind](config, rngs=rngs)
        self.mlp = MLP[config.mlp.kind](config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B J D"], segments: Int[Array, "B J"] | None = None
    ) -> Float[Array, "B J D"]:
        return self.mlp(self.attention(x, segments=segments))


class Transformer(nnx.Module):
    """Decoder from tokens to logits. Parameters are float32; `dtype` is the compute dtype."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape, axes = (config.vocab_size, config.dim), ("vocab", "embed")
        self.embedding = matrix(rngs, shape, axes, config.init_std)
        self.head = None if config.tie_embeddings else matrix(rngs, shape, axes, config.init_std)
        self.blocks = _stacked_blocks(config, rngs.params())
        self.norm = norm_weight(config)

    def __call__(
        self,
        tokens: Int[Array, "B J"],
        segments: Int[Array, "B J"] | None = None,
        *,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "B J V"]:
        """Return the logits in `dtype`; position i sees tokens 0 … i of its own segment."""
        return self.logits(self.hidden(tokens, segments, dtype=dtype))

    def hidden(
        self,
        tokens: Int[Array, "B J"],
        segments: Int[Array, "B J"] | None = None,
        *,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "B J D"]:
        """Return the states after the final norm, which the output head reads."""
        block_of, layers = self._layers()

        def apply(x, layer):
            return lay_out(block_of(layer)(x, segments), "batch", "sequence"), None

        x = lay_out(self.embed(tokens, dtype), "batch", "sequence")
        x = _over_layers(_rematerialised(apply, self.config), x, layers, self.config)[0]
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def watch(
        self,
        look: Callable[[Block, Float[Array, "B J D"]], tuple[Float[Array, "B J D"], Any]],
        tokens: Int[Array, "B J"],
        dtype: DTypeLike | None = None,
    ) -> Any:
        """Run `look(block, x)` in place of each block and return its results, stacked over layers.

        `look` gets the state that enters the block and returns the state that leaves it and a tree
        of arrays.
        """
        block_of, layers = self._layers()
        x = lay_out(self.embed(tokens, dtype), "batch", "sequence")
        return jax.lax.scan(lambda x, layer: look(block_of(layer), x), x, layers)[1]

    def embed(
        self, tokens: Int[Array, "B J"], dtype: DTypeLike | None = None
    ) -> Float[Array, "B J D"]:
        """Return the embeddings of token ids; ids out of range give NaN."""
        # Gathers whole rows, and their gradient before it is split: otherwise XLA copies x to all
        # devices.
        table = lay_out(whole_rows(jnp.asarray(self.embedding[...])), "vocab", None)
        rows = table.at[tokens]
        x = rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return x if dtype is None else x.astype(dtype)

    def head_weight(self) -> Float[Array, "V D"]:
        """Return the output head, one row per token of the vocabulary."""
        return self.embedding[...] if self.head is None else self.head[...]

    def logits(self, x: Float[Array, "B J D"]) -> Float[Array, "B J V"]:
        """Return the logits of states that `hidden` returned."""
        return project(x, self.head_weight())

    def cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        """Return empty decode caches, stacked over the layers."""
        block_of, layers = self._layers()
        first = block_of(jax.tree.map(lambda leaf: leaf[0], layers))
        stack = lambda leaf: jnp.broadcast_to(leaf[None], (self.config.layers, *leaf.shape))
        return jax.tree.map(stack, first.attention.cache(batch, length, dtype))

    def decode(
        self,
        tokens: Int[Array, "B N"],
        cache: Any,
        start: Int[Array, ""],
        *,
        dtype: DTypeLike | None = None,
    ) -> tuple[Float[Array, "B N V"], Any]:
        """Return the logits of N new tokens, the first at `start`, and the updated cache."""
        block_of, layers = self._layers()

        def apply(x, layer_and_cache):
            layer, layer_cache = layer_and_cache
            block = block_of(layer)
            x, layer_cache = block.attention.decode(x, layer_cache, start)
            return block.mlp(x), layer_cache

        x, cache = jax.lax.scan(apply, self.embed(tokens, dtype), (layers, cache))
        return self.logits(rms_norm(x, self.norm[...], self.config.norm_eps)), cache

    def _layers(self) -> tuple[Callable[[Any], Block], Any]:
        """Return a function from one layer's arrays to its block, and the stacked arrays [L, …]."""
        graph, layers = nnx.split(self.blocks)
        return lambda layer: nnx.merge(graph, layer), layers


def _stacked_blocks(config: ModelConfig, key: Array) -> Block:
    """Return a Block of parameters with a leading layer axis, each layer drawn from its own key."""

    def one(key):
        return nnx.to_pure_dict(nnx.state(Block(config, rngs=nnx.Rngs(params=key))))

    stacked = jax.vmap(one)(jax.random.split(key, config.layers))
    return with_values(lambda: Block(config, rngs=nnx.Rngs(params=0)), stacked)


def _rematerialised(apply, config: ModelConfig):
    if config.remat == "none":
        return apply
    known = jax.checkpoint_policies
    attention = known.save_only_these_names(OUTPUT)
    dots = known.save_from_both_policies(known.dots_with_no_batch_dims_saveable, attention)
    policies = {"dots": dots, "attention": attention, "full": None}
    # a scan keeps the two passes apart; without it, XLA would merge them and keep everything
    return jax.checkpoint(apply, policy=policies[config.remat], prevent_cse=not config.scan_layers)


def _over_layers(apply, x, layers, config: ModelConfig):
    """Scan `apply` over the layers, or unroll it: faster to run on CPU, slower to compile."""
    if config.scan_layers:
        return jax.lax.scan(apply, x, layers)
    unstacked = jax.tree.map(lambda leaf: jnp.split(leaf, config.layers), layers)
    is_list = lambda node: isinstance(node, list)
    for index in range(config.layers):
        layer = jax.tree.map(lambda parts, i=index: parts[i][0], unstacked, is_leaf=is_list)
        x, _ = apply(x, layer)
    return x, None

"""The decoder: embedding, blocks of an attention and an MLP sublayer, final norm, output head.

The blocks' parameters are stacked, [L, …], and one compiled block is scanned over them.

Shapes: B batch · J positions · N new positions · D model dim · V vocabulary · L layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from cem_jax.config import ModelConfig
from cem_jax.energy import rms_norm
from cem_jax.kernels import OUTPUT
from cem_jax.model.attention import CEMAttention
from cem_jax.model.llama import GatedMLP, LlamaAttention
from cem_jax.model.mlp import CEMMLP
from cem_jax.model.parameters import matrix, norm_weight
from cem_jax.sharding.layout import lay_out, whole_rows
from cem_jax.sharding.linear import project

ATTENTION = {"cem": CEMAttention, "llama": LlamaAttention}
MLP = {"cem": CEMMLP, "gated": GatedMLP}


class Block(nnx.Module):
    """An attention sublayer, then an MLP sublayer."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = ATTENTION[config.attention.kind](config, rngs=rngs)
        self.mlp = MLP[config.mlp.kind](config, rngs=rngs)

    def __call__(self, x, segments=None, *, attention_steps=None, mlp_steps=None):
        return self.mlp(self.attention(x, attention_steps, segments=segments), mlp_steps)


class Transformer(nnx.Module):
    """Tokens to logits. Parameters are float32; `dtype` is that of the computation."""

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
        dtype=None,
        attention_steps: int | None = None,
        mlp_steps: int | None = None,
    ) -> Float[Array, "B J V"]:
        """Logits, in `dtype`; position i sees tokens 0..i of its own segment.

        `attention_steps`, `mlp_steps`: T in place of the configured ones; the parameters stay.
        """
        x = self.hidden(
            tokens, segments, dtype=dtype, attention_steps=attention_steps, mlp_steps=mlp_steps
        )
        return self.logits(x)

    def hidden(
        self, tokens, segments=None, *, dtype=None, attention_steps=None, mlp_steps=None
    ) -> Float[Array, "B J D"]:
        """The states that the output head reads, after the final norm."""
        steps = dict(attention_steps=attention_steps, mlp_steps=mlp_steps)
        graph, layers = nnx.split(self.blocks)

        def apply(x, layer):
            x = nnx.merge(graph, layer)(x, segments, **steps)
            return lay_out(x, "batch", "sequence"), None

        x = lay_out(self.embed(tokens, dtype), "batch", "sequence")
        x = _over_layers(_rematerialised(apply, self.config), x, layers, self.config)[0]
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def watch(
        self,
        look: Callable[[Block, Float[Array, "B J D"]], tuple[Float[Array, "B J D"], Any]],
        tokens: Int[Array, "B J"],
        dtype=None,
    ) -> Any:
        """What `look(block, x)` sees in each block, stacked over the layers.

        It gets the state that enters the block, and returns the state that leaves it and a tree of
        arrays.
        """
        graph, layers = nnx.split(self.blocks)
        x = lay_out(self.embed(tokens, dtype), "batch", "sequence")
        return jax.lax.scan(lambda x, layer: look(nnx.merge(graph, layer), x), x, layers)[1]

    def embed(self, tokens: Int[Array, "B J"], dtype=None) -> Float[Array, "B J D"]:
        """Embeddings of token ids; out-of-range ids are the caller's fault and give NaN."""
        # Its gradient too has whole rows before it is split: XLA would copy x to all devices.
        table = lay_out(whole_rows(jnp.asarray(self.embedding[...])), "vocab", None)
        rows = table.at[tokens]
        x = rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return x if dtype is None else x.astype(dtype)

    def head_weight(self) -> Float[Array, "V D"]:
        """The output head's rows."""
        return self.embedding[...] if self.head is None else self.head[...]

    def logits(self, x: Float[Array, "B J D"]) -> Float[Array, "B J V"]:
        return project(x, self.head_weight())

    def cache(self, batch: int, length: int, dtype, attention_steps: int | None = None) -> Any:
        """Empty decode caches, stacked over the layers."""
        graph, layers = nnx.split(self.blocks)
        reuse = {"steps": attention_steps} if self.config.attention.kind == "llama" else {}
        one = jax.tree.map(lambda leaf: leaf[0], layers)
        empty = nnx.merge(graph, one).attention.cache(batch, length, dtype, **reuse)
        stack = lambda leaf: jnp.broadcast_to(leaf[None], (self.config.layers, *leaf.shape))
        return jax.tree.map(stack, empty)

    def decode(
        self,
        tokens: Int[Array, "B N"],
        cache: Any,
        start: Int[Array, ""],
        *,
        dtype=None,
        attention_steps: int | None = None,
        mlp_steps: int | None = None,
    ) -> tuple[Float[Array, "B N V"], Any]:
        """Logits of N new tokens at positions `start` …, and the cache with them in it."""
        graph, layers = nnx.split(self.blocks)

        def apply(x, layer_and_cache):
            layer, layer_cache = layer_and_cache
            block = nnx.merge(graph, layer)
            x, layer_cache = block.attention.decode(x, layer_cache, start, attention_steps)
            return block.mlp(x, mlp_steps), layer_cache

        x, cache = jax.lax.scan(apply, self.embed(tokens, dtype), (layers, cache))
        return self.logits(rms_norm(x, self.norm[...], self.config.norm_eps)), cache


def _stacked_blocks(config: ModelConfig, key: Array) -> Block:
    """A Block whose parameters carry a leading layer axis, each layer drawn from its own key."""

    def one(key):
        return nnx.to_pure_dict(nnx.state(Block(config, rngs=nnx.Rngs(params=key))))

    stacked = jax.vmap(one)(jax.random.split(key, config.layers))
    template = nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(template)
    nnx.replace_by_pure_dict(state, stacked)
    return nnx.merge(graph, state)


def _rematerialised(apply, config: ModelConfig):
    if config.remat == "none":
        return apply
    known = jax.checkpoint_policies
    attention = known.save_only_these_names(OUTPUT)
    dots = known.save_from_both_policies(known.dots_with_no_batch_dims_saveable, attention)
    policies = {"dots": dots, "attention": attention, "full": None}
    # a scan keeps the two passes apart; written out, XLA would merge them and keep everything
    return jax.checkpoint(apply, policy=policies[config.remat], prevent_cse=not config.scan_layers)


def _over_layers(apply, x, layers, config: ModelConfig):
    """scan, or the same written out layer by layer (faster to run on CPU, slower to compile)."""
    if config.scan_layers:
        return jax.lax.scan(apply, x, layers)
    unstacked = jax.tree.map(lambda leaf: jnp.split(leaf, config.layers), layers)
    is_list = lambda node: isinstance(node, list)
    for index in range(config.layers):
        layer = jax.tree.map(lambda parts, i=index: parts[i][0], unstacked, is_leaf=is_list)
        x, _ = apply(x, layer)
    return x, None

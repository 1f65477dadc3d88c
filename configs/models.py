"""The models of configs and figures: Llamas, and CEM's replacements in them.

The functions that take a configuration return a changed copy. By default CEM has a
diagonal shared by the heads, ALiBi, a self bias and no preconditioner.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base

PRECONDITIONERS = {  # the field's value: its name in figures
    "none": "no P",
    "diagonal": "diagonal P",
    "diagonal_low_rank": "diagonal and low-rank P",
}


def llama(
    *, dim: int, layers: int, heads: int, hidden: int, vocab_size: int = 32_000
) -> ConfigDict:
    """Return a Llama of these sizes, trained on 20 tokens per parameter, embeddings included."""
    c = base.get_config()
    c.model.update(vocab_size=vocab_size, dim=dim, layers=layers)
    c.model.attention.update(kind="llama", heads=heads, steps=1, position="rope", self_bias=False)
    c.model.mlp.update(kind="gated", dim=hidden, steps=1)
    c.train.tokens = 20 * base.llama_parameters(c)
    return c


def small_llama(*, dim: int, layers: int, heads: int, hidden: int, vocab_size: int) -> ConfigDict:
    """A Llama for a study on one CPU: windows of 128 tokens, float32, evaluated once at the end."""
    c = llama(dim=dim, layers=layers, heads=heads, hidden=hidden, vocab_size=vocab_size)
    c.model.scan_layers = False
    c.data.context = 128
    c.train.compute_dtype = "float32"

    c.checkpoint.every = 1000
    c.checkpoint.keep = 1
    c.checkpoint.keep_best = False
    c.eval.every = 1_000_000
    c.eval.split = "test"  # once, after the last step: no choice depends on it
    c.log.tensorboard = False
    return c


def paper_llama(*, dim: int, layers: int, heads: int, hidden: int) -> ConfigDict:
    """Return a Llama trained as in Table 2, which is base.py, on chips of 16 GiB or more."""
    c = llama(dim=dim, layers=layers, heads=heads, hidden=hidden)
    c.model.remat = "attention"  # recompute the rest, so that all sizes fit a chip of 16 GiB
    c.train.microbatch = 32  # four per update, as in Table 2
    return c


def cem_attention(
    c: ConfigDict,
    *,
    steps: int = 1,
    diagonal: str = "shared",
    position: str = "alibi",
    preconditioner: str = "none",
    **fields: Any,
) -> ConfigDict:
    """Replace attention by CEM's of the same width and heads. `fields` set model.attention."""
    c = c.copy_and_resolve_references()
    c.model.attention.update(
        kind="cem",
        steps=steps,
        diagonal=diagonal,
        position=position,
        self_bias=True,
        preconditioner=preconditioner,
        **fields,
    )
    return c


def cem_mlp(
    c: ConfigDict, *, steps: int = 1, preconditioner: str = "none", width: float = 1
) -> ConfigDict:
    """Replace the MLPs by CEM's, `width` times as wide; at 1.5 they have as many parameters."""
    c = c.copy_and_resolve_references()
    dim = round(width * c.model.mlp.dim)
    c.model.mlp.update(kind="cem", dim=dim, steps=steps, preconditioner=preconditioner)
    return c


def full_cem(c: ConfigDict, *, steps: int = 2) -> ConfigDict:
    """Replace both by CEM's, with P of rank 4 per head in attention and of rank 16 in the MLP."""
    c = cem_attention(c, steps=steps, preconditioner="diagonal_low_rank")
    return cem_mlp(c, steps=steps, preconditioner="diagonal_low_rank")


def reuse_attention(c: ConfigDict, times: int) -> ConfigDict:
    """Apply each attention sublayer, residual included, `times` times: plain reuse."""
    c = c.copy_and_resolve_references()
    c.model.attention.steps = times
    return c


def reuse_mlp(c: ConfigDict, times: int) -> ConfigDict:
    """Apply each MLP sublayer, residual included, `times` times."""
    c = c.copy_and_resolve_references()
    c.model.mlp.steps = times
    return c

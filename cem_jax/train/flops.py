"""FLOPs of what is run, from the configuration alone; peaks of devices; their quotient.

Counted are matrix products, two FLOPs a multiply-add: every projection, score and readout of every
one of the T steps, whether its weight is tied or not, and the output head. Norms and elementwise
work are not, and nor is what an implementation computes twice to save memory.

Scores are counted for causal pairs only: at context J a token sees (J + 1)/2 positions on average.
With document masks some of these pairs are hidden, and they are counted all the same.

Symbols: J context · D model dim · K heads · M MLP dim · V vocabulary · L layers · T steps ·
S rank of a preconditioner.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cem_jax.config import AttentionConfig, MLPConfig, ModelConfig


class Flops(NamedTuple):
    """Of one token's forward pass, by what they are spent on."""

    attention: float  # projections and readouts
    scores: float  # of attention: query with key, softmax with value
    mlp: float
    head: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def forward_flops(model: ModelConfig, context: int) -> Flops:
    """Return the FLOPs per token of a forward pass over windows of `context` tokens, on average.

    Preconditioners are folded once per forward pass, not once per token: see `folding_flops`.
    """
    a, m, layers = model.attention, model.mlp, model.layers
    pairs = (context + 1) / 2
    multiply_adds = Flops(
        attention=layers * _attention_products(a, model.dim),
        scores=layers * a.steps * pairs * _pair(a, model.dim),
        mlp=layers * _mlp_products(m, model.dim),
        head=model.vocab_size * model.dim,
    )
    return Flops(*(2.0 * n for n in multiply_adds))


def flops_per_token(model: ModelConfig, context: int) -> float:
    """Return the FLOPs per token of a forward pass; arguments as in `forward_flops`."""
    return forward_flops(model, context).total


def training_flops_per_token(model: ModelConfig, context: int) -> float:
    """FLOPs a token of a training step: the backward pass costs twice the forward pass.

    What `remat` computes again is not counted, as usual where the quotient with a device's peak is
    meant to say how well the device is used.
    """
    return 3.0 * flops_per_token(model, context)


def folding_flops(model: ModelConfig) -> float:
    """FLOPs of folding the low-rank preconditioners into weights, once a forward pass."""
    a, m = model.attention, model.mlp
    multiply_adds = 0
    if a.kind == "cem":
        multiply_adds += model.dim * _low_rank_row(a, model.dim)  # D = K·R rows
    if m.kind == "cem":
        multiply_adds += m.dim * _low_rank_row(m, model.dim)
    return 2.0 * model.layers * multiply_adds


def _attention_products(a: AttentionConfig, dim: int) -> int:
    """Multiply-adds a token and layer, scores apart."""
    if a.kind == "llama":
        return a.steps * 4 * dim * dim
    step = 2 * dim * dim
    if a.diagonal_in_update:
        # the diagonal's own gradient is a vector, not a weight: P is applied to it, not folded
        vectors = a.heads if a.preconditioner_heads == "per_head" else 1
        step += vectors * _low_rank_row(a, dim)
    return dim * dim + a.steps * step


def _pair(a: AttentionConfig, dim: int) -> int:
    """Multiply-adds of one query and key position, all heads together."""
    if a.kind == "llama" or a.diagonal == "none":
        return 2 * dim
    per_head_p = a.preconditioner != "none" and a.preconditioner_heads == "per_head"
    # with one P a head, the exact gradient takes a shared diagonal head by head as well
    by_head = a.diagonal == "per_head" or (a.diagonal_in_update and per_head_p)
    diagonals = a.heads if by_head else 1
    return (2 + diagonals * (2 if a.diagonal_in_update else 1)) * dim


def _mlp_products(m: MLPConfig, dim: int) -> int:
    """Multiply-adds a token and layer."""
    return (3 * m.steps if m.kind == "gated" else 1 + 2 * m.steps) * dim * m.dim


def _low_rank_row(c: AttentionConfig | MLPConfig, dim: int) -> int:
    """Multiply-adds of one row times the low-rank part of P, in factors."""
    if c.preconditioner != "diagonal_low_rank":
        return 0
    return (4 if c.preconditioner_form == "symmetric" else 2) * dim * c.preconditioner_rank


# Dense bfloat16 peaks of one JAX device, in FLOPs a second.
# docs.cloud.google.com/tpu/docs, the page of each version. A device is a chip, but for TPU7x, where
# it is one of the two cores that share a chip's 2307 teraFLOPS.
_TPU_PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
}
# NVIDIA's datasheets of A100, H100 and H200; for the last two half of what they state with
# sparsity. Names go on with memory and form factor; the first beginning that fits holds.
_NVIDIA_PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100": 989.5e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H200": 989.5e12,
}


def peak_flops(device_kind: str) -> float | None:
    """The dense bfloat16 peak of a device by its `device_kind`, FLOPs a second; None: not known."""
    if device_kind in _TPU_PEAKS:
        return _TPU_PEAKS[device_kind]
    if " MIG " in device_kind:  # a slice of a GPU, under the whole one's name
        return None
    return next(
        (p for name, p in _NVIDIA_PEAKS.items() if re.match(rf"{name}\b", device_kind)), None
    )


class HasKind(Protocol):
    """A `jax.Device`, as far as it is needed here."""

    device_kind: str


def mfu(
    tokens_per_second: float, flops_per_token: float, devices: Sequence[HasKind]
) -> float | None:
    """Model FLOPs utilisation: the share of the devices' bfloat16 peaks that is used.

    Args:
      tokens_per_second: of all devices together.
      flops_per_token: of what is done with a token; in training, `training_flops_per_token`.

    Returns:
      None where the peak of any device is not known.
    """
    peaks = [peak_flops(device.device_kind) for device in devices]
    if not peaks or None in peaks:
        return None
    return tokens_per_second * flops_per_token / sum(peaks)

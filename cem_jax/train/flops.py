"""FLOPs computed from the configuration, the peaks of devices, and the ratio of the two (MFU).

Only matrix products count, at two FLOPs per multiply-add: every projection, score and readout of
each of the T steps, whether or not its weight is tied, and the output head. Norms and elementwise
operations do not count, nor does what an implementation computes again to save memory.

Only causal pairs count as scores: at context J a token sees (J + 1)/2 positions on average. Pairs
hidden by document masks count too.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cem_jax.config import AttentionConfig, MLPConfig, ModelConfig


class Flops(NamedTuple):
    """FLOPs of one token's forward pass, by part of the model."""

    attention: float  # projections and readouts
    scores: float  # of attention: query with key, softmax with value
    mlp: float
    head: float

    @property
    def total(self) -> float:
        """The sum over all parts."""
        return sum(self)


def forward_flops(model: ModelConfig, context: int) -> Flops:
    """Return the average FLOPs per token of a forward pass over windows of `context` tokens.

    Folding the preconditioners is not included: it happens once per forward pass, see
    `folding_flops`.
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
    """Return the total of `forward_flops`."""
    return forward_flops(model, context).total


def training_flops_per_token(model: ModelConfig, context: int) -> float:
    """Return the FLOPs per token of a training step; the backward pass costs two forward passes.

    As is usual for MFU, what `remat` computes again does not count.
    """
    return 3.0 * flops_per_token(model, context)


def folding_flops(model: ModelConfig) -> float:
    """Return the FLOPs of folding the low-rank preconditioners into weights, per forward pass."""
    a, m = model.attention, model.mlp
    multiply_adds = 0
    if a.kind == "cem":
        multiply_adds += model.dim * _low_rank_row(a, model.dim)  # D = K·R rows
    if m.kind == "cem":
        multiply_adds += m.dim * _low_rank_row(m, model.dim)
    return 2.0 * model.layers * multiply_adds


def _attention_products(a: AttentionConfig, dim: int) -> int:
    """Return the multiply-adds per token and layer of attention, without its scores."""
    if a.kind == "llama":
        return a.steps * 4 * dim * dim
    step = 2 * dim * dim
    if a.diagonal_in_update:
        # the diagonal's own gradient is a vector, not a weight: P cannot be folded
        vectors = a.heads if a.preconditioner_heads == "per_head" else 1
        step += vectors * _low_rank_row(a, dim)
    return dim * dim + a.steps * step


def _pair(a: AttentionConfig, dim: int) -> int:
    """Return the multiply-adds per pair of query and key positions, over all heads."""
    if a.kind == "llama" or a.diagonal == "none":
        return 2 * dim
    per_head_p = a.preconditioner != "none" and a.preconditioner_heads == "per_head"
    # with one P per head, the exact gradient also treats a shared diagonal head by head
    by_head = a.diagonal == "per_head" or (a.diagonal_in_update and per_head_p)
    diagonals = a.heads if by_head else 1
    return (2 + diagonals * (2 if a.diagonal_in_update else 1)) * dim


def _mlp_products(m: MLPConfig, dim: int) -> int:
    """Return the multiply-adds per token and layer of the MLP."""
    return (3 * m.steps if m.kind == "gated" else 1 + 2 * m.steps) * dim * m.dim


def _low_rank_row(c: AttentionConfig | MLPConfig, dim: int) -> int:
    """Return the multiply-adds of one row times the factors of P's low-rank part."""
    if c.preconditioner != "diagonal_low_rank":
        return 0
    return (4 if c.preconditioner_form == "symmetric" else 2) * dim * c.preconditioner_rank


# Dense bfloat16 peaks of one JAX device, in FLOPs per second.
# From the page of each version at docs.cloud.google.com/tpu/docs. A device is a chip, except on
# TPU7x, where it is one of the two cores that share a chip's 2307 teraFLOPS.
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
# From NVIDIA's datasheets of the A100, H100 and H200; for the last two, half of the figures with
# sparsity. Device names continue with memory and form factor: the first prefix that matches counts.
_NVIDIA_PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100": 989.5e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H200": 989.5e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bfloat16 peak of a `device_kind` in FLOPs per second; None if unknown."""
    if device_kind in _TPU_PEAKS:
        return _TPU_PEAKS[device_kind]
    if " MIG " in device_kind:  # a slice of a GPU, named after the whole GPU
        return None
    return next(
        (p for name, p in _NVIDIA_PEAKS.items() if re.match(rf"{name}\b", device_kind)), None
    )


class HasKind(Protocol):
    """The part of `jax.Device` that `mfu` uses."""

    device_kind: str


def mfu(
    tokens_per_second: float, flops_per_token: float, devices: Sequence[HasKind]
) -> float | None:
    """Return the model FLOPs utilisation: the fraction of the devices' bfloat16 peaks in use.

    Args:
      tokens_per_second: of all devices together.
      flops_per_token: in training, `training_flops_per_token`.

    Returns:
      None if the peak of any device is unknown.
    """
    peaks = [peak_flops(device.device_kind) for device in devices]
    if not peaks or None in peaks:
        return None
    return tokens_per_second * flops_per_token / sum(peaks)

"""Next-token cross-entropy in chunks of positions: the full logits never exist.

The gradient p − onehot is linear in the loss's own cotangent, a scalar. So the pass that computes
the loss also computes the gradient, while a chunk's logits are at hand: three products with the
head, as without chunks, and only gradients to keep for the backward pass.

Shapes: B sequences · J positions (T = J+1 tokens) · N chunks · C positions per chunk, on each of
the P devices that positions are split over · D model dim · V vocabulary.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from cem_jax.kernels import target_platform
from cem_jax.model import Transformer
from cem_jax.sharding.layout import split_in_use
from cem_jax.sharding.linear import readout, weight_gradient


class ChunkSize(NamedTuple):
    """The size of a chunk on one device."""

    logits: int  # maximum number of logits
    rows: int = 256  # minimum number of positions, which keeps the products efficient


def chunk_size() -> ChunkSize:
    """Return the chunk size that suits the platform.

    Each chunk reads the head and adds to its gradient, so accelerators get few large chunks,
    256 MiB in float32. On CPU, chunks of 4 MiB stay in the caches, which saves up to a third of the
    time of a single chunk.
    """
    return ChunkSize(1 << 20 if target_platform() == "cpu" else 1 << 26)


class Losses(NamedTuple):
    """Sums over targets, float32 (float64 for float64 models); divide by `weight` for means."""

    total: Float[Array, ""]  # Σ weight·(nats + z_loss·logZ²), the training objective
    z: Float[Array, ""]  # the z-loss part of it, for reports; not differentiated
    weight: Float[Array, ""]

    @property
    def nats(self) -> Float[Array, ""]:
        """Σ weight·cross-entropy."""
        return self.total - self.z


def sum_of_losses(
    model: Transformer,
    tokens: Int[Array, "B T"],
    *,
    weights: Float[Array, "B J"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    dtype: DTypeLike | None = None,
    z_loss: float = 0.0,
    shards: int = 1,
    chunks: ChunkSize | None = None,
) -> Losses:
    """Return the summed losses of tokens[:, 1:] given tokens[:, :-1]. Token ids are not checked.

    `weights`: of the targets, default 1; not differentiated. `segments`: document ids, which keep
    attention within a document; a target in the next document still counts. `dtype`: of the
    computation, default float32; softmax and sums use float32 or better. `shards`: devices that the
    batch axis is spread over. `chunks`: default `chunk_size()`.
    """
    x_BJD = model.hidden(
        tokens[:, :-1],
        None if segments is None else segments[:, :-1],
        dtype=dtype,
    )
    sum_dtype = jnp.promote_types(x_BJD.dtype, jnp.float32)
    targets_BJ = tokens[:, 1:]
    if weights is None:
        weights = jnp.ones(targets_BJ.shape, sum_dtype)
    weights_BJ = lax.stop_gradient(weights.astype(sum_dtype))
    head_VD = model.head_weight()
    places = split_in_use().ways("sequence")
    size = chunk_size() if chunks is None else chunks
    chunk = chunk_length(*targets_BJ.shape, len(head_VD), size, shards * places, places)
    total, z = _chunked_losses((z_loss, chunk, places), x_BJD, head_VD, targets_BJ, weights_BJ)
    return Losses(total, lax.stop_gradient(z), weights_BJ.sum())


def chunk_length(
    batch: int, positions: int, vocabulary: int, size: ChunkSize, shards: int = 1, places: int = 1
) -> int:
    """Return the number of positions per chunk; the last chunk is padded to it.

    `shards`: devices that a chunk is spread over. `places`: how many of these positions are split
    over; each has an equal part of every chunk.
    """
    rows = max(size.rows, size.logits // vocabulary) * shards
    chunks = -(-positions // max(1, rows // batch))
    return -(-positions // (chunks * places)) * places


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_losses(static, x_BJD, head_VD, targets_BJ, weights_BJ):
    z_loss, chunk, places = static

    def add(sums, chunk_inputs):
        nats_BC, z_BC, _ = _losses(z_loss, head_VD, *chunk_inputs)
        return (sums[0] + (nats_BC + z_BC).sum(), sums[1] + z_BC.sum()), None

    zero = jnp.zeros((), weights_BJ.dtype)
    return _over_chunks(add, (zero, zero), chunk, places, x_BJD, targets_BJ, weights_BJ)[0]


def _losses_and_gradients(static, x_BJD, head_VD, targets_BJ, weights_BJ):
    z_loss, chunk, places = static

    def add(carry, chunk_inputs):
        total, z, head_bar_VD = carry
        x_BCD, targets_BC, weights_BC = chunk_inputs
        nats_BC, z_BC, softmax = _losses(z_loss, head_VD, *chunk_inputs)
        scale_BC = weights_BC * (1 + 2 * z_loss * softmax.log_z_BC) / softmax.sum_BC
        is_target_BCV = (
            lax.broadcasted_iota(targets_BC.dtype, softmax.exp_BCV.shape, 2)
            == (targets_BC[..., None])
        )
        logits_bar_BCV = scale_BC[..., None] * softmax.exp_BCV - jnp.where(
            is_target_BCV, weights_BC[..., None], 0
        )
        # Two products read this: without the barrier, XLA on CPU computes it twice, in their loops.
        logits_bar_BCV = lax.optimization_barrier(logits_bar_BCV.astype(x_BCD.dtype))
        x_bar_BCD = readout(logits_bar_BCV, head_VD)
        head_bar_VD += weight_gradient(x_BCD, logits_bar_BCV, head_bar_VD.dtype)
        return (total + (nats_BC + z_BC).sum(), z + z_BC.sum(), head_bar_VD), x_bar_BCD

    zero = jnp.zeros((), weights_BJ.dtype)
    carry = (zero, zero, jnp.zeros_like(head_VD))
    carry, x_bar_BJD = _over_chunks(add, carry, chunk, places, x_BJD, targets_BJ, weights_BJ)
    total, z, head_bar_VD = carry
    return (total, z), (x_bar_BJD, head_bar_VD)


def _scaled_gradients(static, gradients, bars):
    total_bar, _ = bars
    x_bar_BJD, head_bar_VD = gradients
    scale = lambda gradient: gradient * total_bar.astype(gradient.dtype)
    return scale(x_bar_BJD), scale(head_bar_VD), None, None


_chunked_losses.defvjp(_losses_and_gradients, _scaled_gradients)


class _Softmax(NamedTuple):
    exp_BCV: Array  # exp(logits − max)
    sum_BC: Array
    log_z_BC: Array


def _losses(z_loss, head_VD, x_BCD, targets_BC, weights_BC) -> tuple[Array, Array, _Softmax]:
    """Return weighted nats and z-losses, and what the gradient needs."""
    # logits stay in float32: rounded to bfloat16, those near 10 would be off by up to 0.03
    logits_BCV = jnp.einsum(
        "bcd,vd->bcv", x_BCD, head_VD.astype(x_BCD.dtype), preferred_element_type=weights_BC.dtype
    )
    max_BC = logits_BCV.max(-1)
    exp_BCV = jnp.exp(logits_BCV - max_BC[..., None])
    sum_BC = exp_BCV.sum(-1)
    log_z_BC = jnp.log(sum_BC) + max_BC
    target_logit_BC = jnp.take_along_axis(
        logits_BCV, targets_BC[..., None], axis=-1, mode="fill", fill_value=jnp.nan
    )[..., 0]
    nats_BC = weights_BC * (log_z_BC - target_logit_BC)
    return nats_BC, weights_BC * z_loss * log_z_BC**2, _Softmax(exp_BCV, sum_BC, log_z_BC)


def _over_chunks(add, carry, chunk, places, *inputs):
    """Scan `add` over chunks of the inputs' axis 1 and join its outputs; a single chunk: no loop.

    A chunk consists of a piece of every device's positions, P·C in all.
    """
    positions = inputs[0].shape[1]
    if chunk == positions:
        return add(carry, inputs)
    piece, count = chunk // places, -(-positions // chunk)

    def split(a_BJ):
        padding = [(0, 0)] * a_BJ.ndim
        padding[1] = (0, count * chunk - positions)
        a_BJ = jnp.pad(a_BJ, padding)
        a_BPNC = a_BJ.reshape(a_BJ.shape[0], places, count, piece, *a_BJ.shape[2:])
        a_NBPC = jnp.moveaxis(a_BPNC, 2, 0)
        return a_NBPC.reshape(count, a_BJ.shape[0], chunk, *a_BJ.shape[2:])

    carry, outputs_NBC = lax.scan(add, carry, jax.tree.map(split, inputs))

    def join(a_NBC):
        a_NBPC = a_NBC.reshape(count, a_NBC.shape[1], places, piece, *a_NBC.shape[3:])
        a_BPNC = jnp.moveaxis(a_NBPC, 0, 2)
        return a_BPNC.reshape(a_NBC.shape[1], -1, *a_NBC.shape[3:])[:, :positions]

    return carry, jax.tree.map(join, outputs_NBC)

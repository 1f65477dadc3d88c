"""How the TPU kernels' arrays lie in HBM, and which block of each a program has in VMEM.

Flat, for the resident kernels: [B, K·R, J] and [B, D, J], positions last. XLA itself lays a
[B, J, D] of 672 columns out so, since nothing is padded then, and the transpose moves nothing.

Laid out, for the streamed ones: what the tiles multiply, by head and, of k and h, both ways round.
A block of keys comes by once for every block of queries, too often to be turned in the kernel.

    qT, kT, vT, doT [B, K, S, J]   k, v [B, K, J, S]   gT [B, D, J], [B, K, D, J]
    h [B, J, D]   hT, eT [B, D, J]   segment_columns [B, J, L]   S: R in whole tiles, L: 128 lanes

J is padded with zeros to whole blocks: no real query sees a padded key, and a padded query has no
cotangent. No program reads past an array. Where positions are split, arrays of queries have those
of one device, and nothing is padded; segments are whole.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cem_jax.kernels.tpu.plan import LANES, Sizes, padded_bytes
from cem_jax.kernels.tpu.rows import Row

SCALARS = ("slopes", "self_bias")  # read one by one, from SMEM
F32 = jnp.dtype(jnp.float32)


class Operand(NamedTuple):
    """An array of a call, as in HBM without its batch axis."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    # What a program has of it: a block of positions, along "queries" or "keys", or "all" of a
    # batch element; "sequence": its queries' block of an array of all positions; "scalars" in SMEM;
    # "hbm": nothing, the kernel itself copies blocks of keys.
    part: str = "queries"
    axis: int = -1  # of its positions

    def block(self, sizes: Sizes) -> tuple[int, ...]:
        size = dict(queries=sizes.queries, sequence=sizes.queries, keys=sizes.keys, hbm=sizes.keys)
        size = size.get(self.part)
        block = list(self.shape)
        if size is not None:
            block[self.axis] = size
        return tuple(block)

    def vmem(self, sizes: Sizes) -> int:
        """Bytes: a block twice, to stream it."""
        if self.part in ("scalars", "hbm"):
            return 0
        return 2 * padded_bytes(self.block(sizes), self.dtype)

    def spec(self, sizes: Sizes) -> pl.BlockSpec:
        if self.part == "scalars":
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        if self.part == "hbm":
            return pl.BlockSpec(memory_space=pl.ANY)
        axis = self.axis % len(self.shape)

        def index(b, x, *streamed):
            where = 0 if self.part == "all" else self._place(x, *streamed, sizes=sizes)
            return (b, *(where if n == axis else 0 for n in range(len(self.shape))))

        return pl.BlockSpec((None, *self.block(sizes)), index)

    def _place(self, x, *streamed, sizes: Sizes):
        """Of the block that the programs of row x have; streamed ones have more coordinates."""
        if not streamed:
            return x
        _, step, *tables = streamed
        row = Row(x, tables, sizes)
        if self.part == "queries":
            return row.block
        if self.part == "sequence":
            return row.place
        return jnp.minimum(sizes.key_block(step), sizes.last_key_block(row.place))


def given(sizes: Sizes) -> tuple[str, ...]:
    """Names of the inputs that a call has."""
    has = dict(v=sizes.values, g=sizes.model, h=sizes.model, slopes=sizes.slopes)
    has |= dict(self_bias=sizes.self_bias, segments=sizes.segments)
    return ("q", "k", *(name for name, present in has.items() if present))


def gradients(sizes: Sizes) -> tuple[str, ...]:
    return tuple(f"d{name}" for name in given(sizes) if name != "segments")


def flat(name: str, sizes: Sizes) -> Operand:
    """An array of the resident kernels, by name; a gradient's is d… of its input's."""
    heads, of = sizes.heads, name.removeprefix("d")
    positions = sizes.positions if of in ("k", "v", "h", "segments") else sizes.asking
    if name in SCALARS:
        return Operand((heads,), F32, "scalars")
    if of in SCALARS:
        return Operand((heads, 1, sizes.queries), F32, "all")
    if name == "segments":
        return Operand((1, positions), jnp.dtype(jnp.int32))
    if name in ("lse", "delta"):
        return Operand((heads, positions), F32)
    rows = heads * sizes.width
    if of in ("h", "a") or (of == "g" and sizes.diagonal == "shared"):
        rows = sizes.model
    elif of == "g":
        rows = heads * sizes.model
    # written once a batch element, after its last block of queries
    part = "all" if name in ("dk", "dv", "dh") else "queries"
    return Operand((rows, positions), F32 if name in ("o", "a") else sizes.dtype, part)


def laid_out(name: str, sizes: Sizes) -> Operand:
    """An array of the streamed kernels, by name; inputs of the tiles have their scratch's names."""
    heads, rows, model, positions = sizes.heads, sizes.rows, sizes.model, sizes.positions
    dtype, asking = sizes.dtype, sizes.asking
    gT = (model, asking) if sizes.diagonal == "shared" else (heads, model, asking)
    known = dict(
        qT=Operand((heads, rows, asking), dtype),
        doT=Operand((heads, rows, asking), dtype),
        gT=Operand(gT, dtype),
        eT=Operand((model, asking), dtype),
        k=Operand((heads, positions, rows), dtype, "keys", 1),
        kT=Operand((heads, rows, positions), dtype, "keys"),
        h=Operand((positions, model), dtype, "keys", 0),
        hT=Operand((model, positions), dtype, "keys"),
        segments=Operand((1, positions), jnp.dtype(jnp.int32), "sequence"),
        segment_columns=Operand((positions, LANES), jnp.dtype(jnp.int32), "keys", 0),
        dk=Operand((heads, rows, positions), F32, "hbm"),
        dh=Operand((model, positions), F32, "hbm"),
    )
    known |= dict(v=known["k"], vT=known["kT"], dv=known["dk"])
    return known[name] if name in known else flat(name, sizes)


def arrange(name: str, arrays: dict, operand: Operand, sizes: Sizes):
    """The array of a call from those of `Inputs` and its like: [B, J, …], [B, K, J], [B, J]."""
    if name in SCALARS:
        return arrays[name].astype(operand.dtype)
    if name in ("lse", "delta"):
        return _padded(arrays[name], -1, operand)
    source = dict(doT="do", eT="da", segment_columns="segments")
    x = _padded(arrays[source.get(name, name.removesuffix("T"))], 1, operand)
    x = x.astype(operand.dtype)
    if name == "segments":
        return x[:, None]
    if name == "segment_columns":
        return jnp.broadcast_to(x[..., None], (*x.shape, LANES))
    if len(operand.shape) == 2:
        x = x.reshape(*x.shape[:2], -1)  # [B, J, ·]
        return x if operand.axis == 0 else jnp.swapaxes(x, 1, 2)
    columns = operand.shape[1 if operand.axis == -1 else 2]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, columns - x.shape[-1])))
    return x.transpose((0, 2, 3, 1) if operand.axis == -1 else (0, 2, 1, 3))


def restore(x, shape: tuple[int, ...]):
    """An output [B, ·, J], or [B, K, S, J], as an array of `shape` [B, J, …]."""
    if x.ndim == 4:
        x = x[:, :, : shape[-1]].reshape(x.shape[0], -1, x.shape[-1])
    return jnp.swapaxes(x, 1, 2)[:, : shape[1]].reshape(shape)


def _padded(x, axis: int, operand: Operand):
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, operand.shape[operand.axis] - x.shape[axis])
    return jnp.pad(x, missing) if missing[axis][1] else x

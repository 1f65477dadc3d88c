"""Attention's forward pass on a GPU: one program per query block and head, streaming the keys.

Shapes as in `tiles`. Per row, over the key blocks seen so far and with scores in base 2:
m the running maximum, z = Σ_j 2^(t − m), o = Σ_j 2^(t − m) v_j.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from cem_jax.kernels.gpu import tiles
from cem_jax.kernels.gpu.tiles import Operands, Output, Task

_LOWEST = -1e30


def attend(operands: Operands, task: Task) -> tuple[jax.Array, jax.Array]:
    """Return (lse [B, K, J], o [B, J, K, R]), in float32."""
    batch, positions, heads, width = operands.q.shape
    blocks = pl.cdiv(positions, task.queries)
    # heads vary fastest: they share a row of tiles in the cache; the longest rows start first
    number = lambda x: blocks - 1 - x
    o = jax.ShapeDtypeStruct((batch, positions, heads, width), jnp.float32)
    lse = jax.ShapeDtypeStruct((batch, heads, positions), jnp.float32)
    outputs = (
        Output(o, tiles.head_block(task, task.queries, number)),
        Output(lse, tiles.row_block(task.queries, number)),
    )
    grid = (heads, blocks, batch)
    o, lse = tiles.launch(_kernel, operands, grid, outputs, task, "cem_forward")
    return lse, o


def _kernel(refs: Operands, out_refs: tuple, task: Task):
    o_ref, lse_ref = out_refs
    head = pl.program_id(0)
    i0 = (pl.num_programs(1) - 1 - pl.program_id(1)) * task.queries
    q = tiles.read_head(refs.q, i0, task.queries, head, task)

    def visit(block, carry, edge):
        m_I, z_I, o = carry
        j0 = block * task.keys
        k, v = tiles.read_keys(refs, j0, head, task)
        tile = tiles.tile_at(refs, head, i0, j0, task, edge=edge)
        t_IN, offset_I = tiles.scores(refs, tiles.dot_heads(q, k), tile, task)
        new_I = jnp.maximum(m_I, t_IN.max(1) + offset_I)
        p_IN = tiles.exp2(t_IN - (new_I - offset_I)[:, None], task)
        shrink_I = tiles.exp2(m_I - new_I, task)
        o = tuple(shrink_I[:, None] * x for x in o)
        o = tiles.accumulate(o, p_IN.astype(k[0].dtype), v)
        return new_I, shrink_I * z_I + p_IN.sum(1), o

    start = (
        jnp.full((task.queries,), _LOWEST, jnp.float32),
        jnp.zeros((task.queries,), jnp.float32),
        tiles.zeros(task.queries, task),
    )
    first, end = tiles.keys_of(i0, task)
    m_I, z_I, o = tiles.sweep(visit, start, (jnp.int32(0), first), (first, end))
    tiles.write_head(o_ref, tuple(x / z_I[:, None] for x in o), task)
    lse_ref[...] = m_I / tiles.LOG2E + jnp.log(z_I)

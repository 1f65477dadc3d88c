"""Parts of the TPU kernels: laying blocks out in VMEM, and the scores of a tile.

Tiles are transposed, keys along sublanes and queries along lanes: lse, Δ and every other number of
a query is then a row, sums over keys run along sublanes, and a product that ends in a head's R
columns has R rows instead, which the matrix unit need not pad to 128.

Shapes: J positions · K heads · R head dim, S the same in whole tiles · D model dim ·
I, N positions of a query and a key block · L 128 lanes.
Scratch, laid out once a block and kept while its batch element lasts:

    k, v [K, J, S]  kT, vT [K, S, J]  h [J, D]  hT [D, J]  qT, doT [K, S, I]  gT [D, I], [K, D, I]

A block of queries sees no later key, so keys are laid out as their block comes by.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cem_jax.kernels.tpu_plan import LANES, Sizes

HIDDEN = -1e30  # a score's, before scaling; finite, so that no difference of two is NaN
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def product(a, b, over: tuple[int, int], sizes: Sizes):
    """a·b summed over one axis of each, in float32."""
    return lax.dot_general(
        a, b, (((over[0],), (over[1],)), ((), ())),
        precision=sizes.precision, preferred_element_type=jnp.float32,
    )  # fmt: skip


def span(start, size: int):
    return pl.ds(pl.multiple_of(start, LANES), size)


def head_slice(head: int, width: int) -> slice:
    return slice(head * width, (head + 1) * width)


def for_each_head(visit, sizes: Sizes, together: int):
    """visit(head) for all; `together` at a time, for the scheduler to interleave."""
    step = max(n for n in range(1, together + 1) if sizes.heads % n == 0)

    def some(n, _):
        for offset in range(step):
            visit(n * step + offset)
        return 0

    lax.fori_loop(0, sizes.heads // step, some, 0)


def lay_out_heads(block_DI, sizes: Sizes, *, rows=None, columns=None):
    """Each head's rows of a block: into `rows` [K, S, ·], and transposed into `columns` [K, ·, S].

    Both are (ref, start of the block's positions in it). Zeros pad the head dim.
    """
    padding = jnp.zeros((sizes.rows - sizes.width, sizes.queries), sizes.dtype)
    for head in range(sizes.heads):
        head_SI = block_DI[head_slice(head, sizes.width), :]
        if sizes.rows > sizes.width:
            head_SI = jnp.concatenate([head_SI, padding], axis=0)
        if rows is not None:
            ref, start = rows
            ref[head, :, span(start, sizes.queries)] = head_SI
        if columns is not None:
            ref, start = columns
            ref[head, span(start, sizes.queries), :] = head_SI.T


def lay_out_diagonal(inputs: dict, refs: dict, start, sizes: Sizes):
    """g and h; `refs` gains gT."""
    if sizes.diagonal == "none":
        return
    refs["h"][span(start, sizes.queries), :] = inputs["h"][...].T
    if "hT" in refs:
        refs["hT"][:, span(start, sizes.queries)] = inputs["h"][...]
    if sizes.diagonal == "shared":
        refs["gT"] = inputs["g"]
        return
    for head in range(sizes.heads):
        refs["gT"][head] = inputs["g"][head_slice(head, sizes.model), :]


def lay_out_segments(segments_ref, columns_ref, start, sizes: Sizes):
    """Document ids of a block of keys along sublanes, the same in every lane. [J, L]."""
    row_LI = jnp.broadcast_to(segments_ref[...], (LANES, sizes.queries))
    columns_ref[span(start, sizes.queries), :] = row_LI.T


def widened(column_NL, width: int):
    """[N, L], the same in every lane → [N, width]."""
    return jnp.concatenate([column_NL] * (width // LANES), axis=1)


class Tile:
    """Keys from `first_key` against queries of block `i` from lane `skip` on.

    `crossing`: whether the diagonal runs through it. A tile beyond it holds visible pairs only.
    """

    def __init__(self, sizes: Sizes, i, first_key, skip: int = 0, crossing: bool = False):
        self.sizes = sizes
        self.keys = span(first_key, sizes.keys)
        self.lanes = slice(skip, sizes.queries)
        self.shape = (sizes.keys, sizes.queries - skip)
        self.crossing = crossing
        self.skip = skip
        self.ahead = first_key - i * sizes.queries  # the first key's j − the block's first i

    def distance(self):
        """i − j. [N, I]."""
        b, a = (lax.broadcasted_iota(jnp.int32, self.shape, axis) for axis in (0, 1))
        return a - b + (self.skip - self.ahead)

    def key_ahead(self):
        """j − the block's first i, the same in every lane. [N, L]."""
        b = lax.broadcasted_iota(jnp.int32, (self.shape[0], LANES), 0)
        return (b + self.ahead).astype(jnp.float32)

    def common(self, refs, head=None):
        """g·h with hidden pairs far below; None where nothing is to be added. [N, I]."""
        sizes = self.sizes
        common_NI = None
        if sizes.diagonal == "shared":
            common_NI = product(refs["h"][self.keys], refs["gT"][:, self.lanes], (1, 0), sizes)
        elif sizes.diagonal == "per_head":
            gT_DI = refs["gT"][head, :, self.lanes]
            common_NI = product(refs["h"][self.keys], gT_DI, (1, 0), sizes)
        return self.hide(common_NI, refs)

    def hide(self, common_NI, refs):
        visible_NI = None
        if self.crossing:
            visible_NI = self.distance() >= 0
        if self.sizes.segments:
            keys_NI = widened(refs["segment_columns"][self.keys], self.shape[1])
            same_NI = keys_NI == refs["segments"][:, self.lanes]
            visible_NI = same_NI if visible_NI is None else visible_NI & same_NI
        if visible_NI is None:
            return common_NI
        if common_NI is None:
            common_NI = jnp.zeros(self.shape, jnp.float32)
        return jnp.where(visible_NI, common_NI, HIDDEN)

    def scores(self, refs, head, common_NI):
        """s·log₂e without what depends on the query alone, `query_bias`. [N, I]."""
        sizes = self.sizes
        kq_NI = product(refs["k"][head, self.keys], refs["qT"][head, :, self.lanes], (1, 0), sizes)
        if common_NI is not None:
            kq_NI = kq_NI + common_NI
        scores_NI = kq_NI * (sizes.c * LOG2E)
        if sizes.slopes:
            bias_NL = self.key_ahead() * (refs["slopes"][head] * LOG2E)
            scores_NI = scores_NI + widened(bias_NL, self.shape[1])
        if sizes.self_bias and self.crossing:
            beta = refs["self_bias"][head] * LOG2E
            scores_NI = scores_NI + jnp.where(self.distance() == 0, beta, 0.0)
        return scores_NI


def query_bias(slopes_ref, head, sizes: Sizes):
    """m·(i − the block's first i), which `Tile.scores` leaves out. [1, I]."""
    a_1I = lax.broadcasted_iota(jnp.int32, (1, sizes.queries), 1).astype(jnp.float32)
    return a_1I * slopes_ref[head]


def for_each_tile(visit, i, sizes: Sizes):
    """visit(tile) for the tiles of query block i: whole ones, then those on the diagonal."""

    def whole(j, _):
        visit(Tile(sizes, i, j * sizes.keys))
        return 0

    ratio = sizes.queries // sizes.keys
    lax.fori_loop(0, i * ratio, whole, 0)
    for n in range(ratio):
        first_key = i * sizes.queries + n * sizes.keys
        visit(Tile(sizes, i, first_key, skip=n * sizes.keys, crossing=True))

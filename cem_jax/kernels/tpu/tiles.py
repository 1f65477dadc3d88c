"""Parts of the TPU kernels: laying blocks out in VMEM, and the scores of a tile.

Tiles are transposed, keys along sublanes and queries along lanes: lse, Δ and every other number of
a query is then a row, sums over keys run along sublanes, and a product that ends in a head's R
columns has R rows instead, which the matrix unit need not pad to 128.

Shapes: J positions · K heads · R head dim, S the same in whole tiles · D model dim ·
I, N positions of a query and a key block · L 128 lanes.
Scratch, laid out once a block and kept while its batch element lasts:

    k, v [K, J, S]  kT, vT [K, S, J]  h [J, D]  hT [D, J]  qT, doT [K, S, I]  gT [D, I], [K, D, I]

A block of queries sees no later key, so resident kernels lay keys out as their block comes by. To
streamed kernels all of these come laid out, a block of keys in place of J.
"""

import math
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cem_jax.kernels.tpu.plan import LANES, Sizes

STRIP = 256  # queries of a piece of a tile on the diagonal
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
    """visit(head) for all; `together` at a time, for the scheduler to interleave.

    A visit may return a function that writes its results: it is called once all of those together
    have read, since the compiler does not know that their rows differ.
    """
    step = max(n for n in range(1, together + 1) if sizes.heads % n == 0)

    def some(n, _):
        writes = [visit(n * step + offset) for offset in range(step)]
        for write in writes:
            if write is not None:
                write()
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
    """Keys from `first_key` on against a strip of the queries of block `i`.

    `strip`: its lanes. `behind`: where the keys begin after the block's first query, known for
    tiles that the diagonal crosses, else None: then every pair is visible.
    """

    def __init__(self, sizes: Sizes, i, first_key, strip: tuple[int, int], behind: int | None):
        self.sizes, self.i, self.first_key, self.behind = sizes, i, first_key, behind
        self.lanes = slice(*strip)
        count = sizes.keys
        if behind is not None:  # keys after the strip's last query are left out
            count = min(count, strip[1] - behind)
        self.keys = slice(0, count) if sizes.streamed else span(first_key, count)
        self.rows = slice(0, count)
        self.shape = (count, strip[1] - strip[0])
        self.crossing = behind is not None and behind + count - 1 > strip[0]
        self.ahead = first_key - i * sizes.queries  # the first key's j − the block's first i

    def strips(self) -> list:
        """The tile itself; on the diagonal pieces of it, for each to leave out what it can."""
        if self.behind is None:
            return [self]
        starts = range(self.lanes.start, self.lanes.stop, STRIP)
        ends = (min(start + STRIP, self.lanes.stop) for start in starts)
        pieces = zip(starts, ends, strict=True)
        return [Tile(self.sizes, self.i, self.first_key, x, self.behind) for x in pieces]

    def distance(self):
        """i − j. [N, I]."""
        b, a = (lax.broadcasted_iota(jnp.int32, self.shape, axis) for axis in (0, 1))
        return a - b + (self.lanes.start - self.ahead)

    def key_ahead(self):
        """j − the block's first i, the same in every lane. [N, L]."""
        b = lax.broadcasted_iota(jnp.int32, (self.shape[0], LANES), 0)
        return (b + self.ahead).astype(jnp.float32)

    def diagonal(self, refs, head=None):
        """h·gᵀ. [N, I]."""
        gT_DI = refs["gT"][:, self.lanes] if head is None else refs["gT"][head, :, self.lanes]
        return product(refs["h"][self.keys], gT_DI, (1, 0), self.sizes)

    def visible(self, refs):
        """Which pairs are visible, None for all. [N, I]."""
        visible_NI = self.distance() >= 0 if self.crossing else None
        if self.sizes.segments:
            keys_NI = widened(refs["segment_columns"][self.keys], self.shape[1])
            same_NI = keys_NI == refs["segments"][:, self.lanes]
            visible_NI = same_NI if visible_NI is None else visible_NI & same_NI
        return visible_NI

    def scores(self, refs, head):
        """s·log₂e without what depends on the query alone, `query_bias`. [N, I]."""
        sizes = self.sizes
        s_NI = product(refs["k"][head, self.keys], refs["qT"][head, :, self.lanes], (1, 0), sizes)
        if sizes.diagonal == "per_head":
            s_NI = s_NI + self.diagonal(refs, head)
        if self.shares:
            s_NI = s_NI + refs["shared"][self.rows, self.lanes]
        s_NI = s_NI * (sizes.c * LOG2E)
        if sizes.slopes:
            bias_NL = self.key_ahead() * (refs["slopes"][head] * LOG2E)
            s_NI = s_NI + widened(bias_NL, self.shape[1])
        if sizes.self_bias and self.crossing:
            beta = refs["self_bias"][head] * LOG2E
            s_NI = s_NI + jnp.where(self.distance() == 0, beta, 0.0)
        return s_NI

    @property
    def shares(self) -> bool:
        """Whether the heads share a part of the scores: the diagonal's, and what hides pairs."""
        return self.crossing or self.sizes.segments or self.sizes.diagonal == "shared"


def share_scores(strips: list, refs: dict):
    """Writes what the heads share of each strip's scores."""
    for strip in strips:
        if not strip.shares:
            continue
        shared_NI = jnp.zeros(strip.shape, jnp.float32)
        if strip.sizes.diagonal == "shared":
            shared_NI = strip.diagonal(refs)
        visible_NI = strip.visible(refs)
        if visible_NI is not None:
            shared_NI = jnp.where(visible_NI, shared_NI, HIDDEN)
        refs["shared"][strip.rows, strip.lanes] = shared_NI


def query_bias(slopes_ref, head, sizes: Sizes):
    """m·(i − the block's first i), which `Tile.scores` leaves out. [1, I]."""
    a_1I = lax.broadcasted_iota(jnp.int32, (1, sizes.queries), 1).astype(jnp.float32)
    return a_1I * slopes_ref[head]


def for_each_tile(visit, i, sizes: Sizes):
    """Resident: visit(tile) for those of query block i, whole ones, then those on the diagonal."""

    def whole(j, _):
        visit(Tile(sizes, i, j * sizes.keys, (0, sizes.queries), None))
        return 0

    lax.fori_loop(0, i * sizes.ratio, whole, 0)
    for behind in range(0, sizes.queries, sizes.keys):
        first_key = i * sizes.queries + behind
        visit(Tile(sizes, i, first_key, (behind, sizes.queries), behind))


def at_tile(visit, i, j, sizes: Sizes):
    """Streamed: visit(tile) for that of query block i and key block j, unless it is all hidden."""

    def see(behind):
        lanes = (behind or 0, sizes.queries)
        visit(Tile(sizes, i, j * sizes.keys, lanes, behind))

    pl.when(j < i * sizes.ratio)(partial(see, None))
    for n in range(sizes.ratio):
        pl.when(j == i * sizes.ratio + n)(partial(see, n * sizes.keys))

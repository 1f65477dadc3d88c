"""Parts of the TPU kernels: laying blocks out in VMEM, and the scores of a tile.

Tiles are transposed, keys along sublanes and queries along lanes: lse, Δ and every other number of
a query is then a row, sums over keys run along sublanes, and a product that would have a
head's R columns has R rows instead, which the matrix unit need not pad to 128.

Shapes: J positions · K heads · R head dim, S padded to whole tiles · D model dim ·
I, N positions of a query and a key block · L 128 lanes.

A query block sees no later key, so resident kernels lay out keys along with their query block.
Streamed kernels receive operands already laid out, with one key block in place of J.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Shaped

from cem_jax.kernels.call import BIASES, Scores
from cem_jax.kernels.tpu.layout import LANES, Index, Program, Sizes

STRIP = 256  # queries of a piece of a tile on the diagonal
HIDDEN = -1e30  # a hidden score before scaling; finite, so that no difference of two is NaN
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
Ref = Any  # a reference into memory; Pallas has no public type of it


class Refs(NamedTuple):
    """References into memory by name; None for those a kernel lacks.

    Operands are laid out once per block and kept for the rest of their batch element.
    """

    # operands of the tiles
    qT: Any = None  # [K, S, I]
    k: Any = None  # [K, J, S]
    kT: Any = None  # [K, S, J]
    v: Any = None  # [K, J, S]
    vT: Any = None  # [K, S, J]
    gT: Any = None  # [D, I], [K, D, I]
    h: Any = None  # [J, D]
    hT: Any = None  # [D, J]
    doT: Any = None  # [K, S, I]
    eT: Any = None  # gradient of a: [D, I]
    scores: Scores = Scores()  # biases in SMEM, segments of the queries [1, I]
    segment_columns: Any = None  # of the keys, the same in every lane: [J, L]
    # the part of a tile's scores that heads share, and sums over heads of a tile
    shared: Any = None  # [N, I]
    cross: Any = None  # E_ij = e_i·h_j: [N, I]
    ds_sum: Any = None  # [N, I]
    p_sum: Any = None  # [N, I]
    # sums of a block of queries, forward
    peak: Any = None  # running maximum of the scores in base 2: [K, 1, I]
    total: Any = None  # Σ_j p, unnormalized: [K, 1, I]
    oT: Any = None  # [K, S, I]
    aT: Any = None  # [D, I]
    # and backward
    minus_lse: Any = None  # −lse without the query's bias, times log₂e: [K, 1, I]
    delta: Any = None  # Δ: [K, 1, I], as an input [K, I]
    dqT: Any = None  # [K, S, I]
    dgT: Any = None  # as gT
    dkT: Any = None  # [K, S, J]
    dvT: Any = None  # [K, S, J]
    dhT: Any = None  # [D, J]
    dscores: Scores = Scores()  # a sum per lane: [K, 1, I]
    # blocks of a resident kernel's inputs, beside k, v, h, positions last: [·, I]
    q: Any = None
    g: Any = None
    do: Any = None
    da: Any = None
    # blocks of the outputs; lse also an input
    lse: Any = None  # [K, I]
    o: Any = None
    a: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dg: Any = None
    dh: Any = None


def refs_of(named: dict[str, Any]) -> Refs:
    """Return the record of references by name."""
    named = dict(named)
    scores = {n: named.pop(n) for n in Scores._fields if n in named}
    dscores = {n: named.pop(f"d{n}") for n in BIASES if f"d{n}" in named}
    return Refs(**named, scores=Scores(**scores), dscores=Scores(**dscores))


def merged(program: Program) -> Refs:
    """Return the references that tiles use: operands, whether inputs or scratch, and sums."""
    kept = {name: ref for name, ref in program.kept._asdict().items() if ref is not None}
    kept |= dict(scores=program.inputs.scores, dscores=program.outputs.dscores)
    return program.inputs._replace(**kept)


def clear(*refs: Ref | None) -> None:
    """Write zeros into those that are not None."""
    for ref in refs:
        if ref is not None:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)


def product(
    a: Float[Array, "M N"], b: Float[Array, "P Q"], over: tuple[int, int], sizes: Sizes
) -> Float[Array, "A C"]:
    """Return a·b summed over one axis of each, in float32."""
    return lax.dot_general(
        a, b, (((over[0],), (over[1],)), ((), ())),
        precision=sizes.precision, preferred_element_type=jnp.float32,
    )  # fmt: skip


def span(start: Index, size: int) -> pl.Slice:
    """Return `size` positions from `start` on, a multiple of 128."""
    return pl.ds(pl.multiple_of(start, LANES), size)


def head_slice(head: int, width: int) -> slice:
    return slice(head * width, (head + 1) * width)


def for_each_head(visit: Callable, sizes: Sizes, together: int) -> None:
    """Call visit(head) for all heads, `together` at a time, for the scheduler to interleave.

    A visit may return a function that writes its results. It is called once the whole group has
    read, since the compiler does not know that the heads' rows differ.
    """
    step = max(n for n in range(1, together + 1) if sizes.heads % n == 0)

    def some(n, _):
        writes = [visit(n * step + offset) for offset in range(step)]
        for write in writes:
            if write is not None:
                write()
        return 0

    lax.fori_loop(0, sizes.heads // step, some, 0)


def lay_out_heads(
    block_DI: Ref,
    sizes: Sizes,
    *,
    rows: tuple[Ref, Index] | None = None,
    columns: tuple[Ref, Index] | None = None,
) -> None:
    """Write each head's rows of a block into `rows` [K, S, ·], transposed into `columns` [K, ·, S].

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


def lay_out_diagonal(inputs: Refs, refs: Refs, start: Index, sizes: Sizes) -> None:
    """Lay out h and, if each head has its own, g; a shared g is read in place."""
    if sizes.diagonal == "none":
        return
    refs.h[span(start, sizes.queries), :] = inputs.h[...].T
    if refs.hT is not None:
        refs.hT[:, span(start, sizes.queries)] = inputs.h[...]
    if sizes.diagonal == "per_head":
        for head in range(sizes.heads):
            refs.gT[head] = inputs.g[head_slice(head, sizes.model), :]


def lay_out_segments(refs: Refs, start: Index, sizes: Sizes) -> None:
    """Lay out the document ids of a block of keys along sublanes, if there are any."""
    if sizes.scores.segments:
        row_LI = jnp.broadcast_to(refs.scores.segments[...], (LANES, sizes.queries))
        refs.segment_columns[span(start, sizes.queries), :] = row_LI.T


def widened(column_NL: Shaped[Array, "N L"], width: int) -> Shaped[Array, "N I"]:
    """Widen a column that is the same in every lane to `width` lanes."""
    return jnp.concatenate([column_NL] * (width // LANES), axis=1)


class Tile:
    """A tile: keys from `first_key` on and a strip of the queries of block `i`.

    `strip`: its lanes. `behind`: the offset of the first key from the block's first query, for
    tiles that the diagonal crosses; else None: then every pair is visible.
    """

    def __init__(
        self, sizes: Sizes, i: Index, first_key: Index, strip: tuple[int, int], behind: int | None
    ):
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

    def strips(self) -> list["Tile"]:
        """Return the tile itself, or, on the diagonal, strips, each without hidden keys."""
        if self.behind is None:
            return [self]
        starts = range(self.lanes.start, self.lanes.stop, STRIP)
        ends = (min(start + STRIP, self.lanes.stop) for start in starts)
        pieces = zip(starts, ends, strict=True)
        return [Tile(self.sizes, self.i, self.first_key, x, self.behind) for x in pieces]

    def distance(self) -> Int[Array, "N I"]:
        """Return i − j."""
        b, a = (lax.broadcasted_iota(jnp.int32, self.shape, axis) for axis in (0, 1))
        return a - b + (self.lanes.start - self.ahead)

    def key_ahead(self) -> Float[Array, "N L"]:
        """Return j − the block's first i, the same in every lane."""
        b = lax.broadcasted_iota(jnp.int32, (self.shape[0], LANES), 0)
        return (b + self.ahead).astype(jnp.float32)

    def diagonal(self, refs: Refs, head: Index | None = None) -> Float[Array, "N I"]:
        """Return h·gᵀ."""
        gT_DI = refs.gT[:, self.lanes] if head is None else refs.gT[head, :, self.lanes]
        return product(refs.h[self.keys], gT_DI, (1, 0), self.sizes)

    def visible(self, refs: Refs) -> Bool[Array, "N I"] | None:
        """Return which pairs are visible; None for all."""
        visible_NI = self.distance() >= 0 if self.crossing else None
        if self.sizes.scores.segments:
            keys_NI = widened(refs.segment_columns[self.keys], self.shape[1])
            same_NI = keys_NI == refs.scores.segments[:, self.lanes]
            visible_NI = same_NI if visible_NI is None else visible_NI & same_NI
        return visible_NI

    def scores(self, refs: Refs, head: Index) -> Float[Array, "N I"]:
        """Return s·log₂e without `query_bias`, which depends only on the query."""
        sizes = self.sizes
        s_NI = product(refs.k[head, self.keys], refs.qT[head, :, self.lanes], (1, 0), sizes)
        if sizes.diagonal == "per_head":
            s_NI = s_NI + self.diagonal(refs, head)
        if self.shares:
            s_NI = s_NI + refs.shared[self.rows, self.lanes]
        s_NI = s_NI * (sizes.c * LOG2E)
        if sizes.scores.slopes:
            bias_NL = self.key_ahead() * (refs.scores.slopes[head] * LOG2E)
            s_NI = s_NI + widened(bias_NL, self.shape[1])
        if sizes.scores.self_bias and self.crossing:
            beta = refs.scores.self_bias[head] * LOG2E
            s_NI = s_NI + jnp.where(self.distance() == 0, beta, 0.0)
        return s_NI

    def add_bias_gradients(self, refs: Refs, head: Index, ds_NI: Float[Array, "N I"]) -> None:
        """Add to dm = −Σ (i − j) dS and dβ = Σ_i dS_ii, one sum per lane."""
        if self.sizes.scores.slopes:
            distance_NI = self.distance().astype(jnp.float32)
            refs.dscores.slopes[head, :, self.lanes] -= (ds_NI * distance_NI).sum(0, keepdims=True)
        if self.sizes.scores.self_bias and self.crossing:
            own_NI = jnp.where(self.distance() == 0, ds_NI, 0.0)
            refs.dscores.self_bias[head, :, self.lanes] += own_NI.sum(0, keepdims=True)

    @property
    def shares(self) -> bool:
        """Return whether heads share a part of the scores: the diagonal's, and masks."""
        return self.crossing or self.sizes.scores.segments or self.sizes.diagonal == "shared"


def share_scores(strips: list[Tile], refs: Refs) -> None:
    """Write the part of each strip's scores that the heads share."""
    for strip in strips:
        if not strip.shares:
            continue
        shared_NI = jnp.zeros(strip.shape, jnp.float32)
        if strip.sizes.diagonal == "shared":
            shared_NI = strip.diagonal(refs)
        visible_NI = strip.visible(refs)
        if visible_NI is not None:
            shared_NI = jnp.where(visible_NI, shared_NI, HIDDEN)
        refs.shared[strip.rows, strip.lanes] = shared_NI


def query_bias(refs: Refs, head: Index, sizes: Sizes) -> Float[Array, "1 I"] | None:
    """Return m·(i − the block's first i), which `Tile.scores` leaves out; None if nothing."""
    if not sizes.scores.slopes:
        return None
    a_1I = lax.broadcasted_iota(jnp.int32, (1, sizes.queries), 1).astype(jnp.float32)
    return a_1I * refs.scores.slopes[head]


def for_each_tile(visit: Callable, i: Index, sizes: Sizes) -> None:
    """Resident: visit the tiles of query block i, whole ones first, then those on the diagonal."""

    def whole(j, _):
        visit(Tile(sizes, i, j * sizes.keys, (0, sizes.queries), None))
        return 0

    lax.fori_loop(0, i * sizes.ratio, whole, 0)
    for behind in range(0, sizes.queries, sizes.keys):
        first_key = i * sizes.queries + behind
        visit(Tile(sizes, i, first_key, (behind, sizes.queries), behind))


def at_tile(visit: Callable, i: Index, j: Index, sizes: Sizes) -> None:
    """Streamed: visit the tile of query block i and key block j, unless it is all hidden."""

    def see(behind):
        lanes = (behind or 0, sizes.queries)
        visit(Tile(sizes, i, j * sizes.keys, lanes, behind))

    pl.when(j < i * sizes.ratio)(partial(see, None))
    for n in range(sizes.ratio):
        pl.when(j == i * sizes.ratio + n)(partial(see, n * sizes.keys))

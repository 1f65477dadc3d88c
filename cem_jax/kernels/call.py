"""One call of a kernel: its arrays, its static options, and its outputs.

Shapes: B leading axes · J positions (i query, j key) · K heads · R head dim · D model dim ·
I, N any number of query and key positions.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

# "pallas" is the fused kernel of the platform that the program is compiled for
IMPLEMENTATIONS = ("auto", "dense", "blockwise", "pallas")
AVERAGES = ("none", "summed", "per_head")


class Scores(NamedTuple):
    """The parts of a score besides its products: biases, and masks that hide pairs.

        s_ijk = (k_jk·q_ik + g_i·h_j)/τ − m_k(i−j) + β_k[i=j]      hidden: j > i, other segments

    To add a score bias, extend

        here                 a field of one number per head, and its term in `bias`
        kernels/tpu/tiles    `Tile.scores` and `Tile.add_bias_gradients`
        kernels/gpu/tiles    `scores` and `bias_gradients`
        model/heads          `Heads._scores`, which makes this record from a layer's parameters
        config/schema        the field that switches it on
        verify/plain         the formula that `cem verify` compares with

    Everything else passes the record on: implementations in plain JAX take values and gradients
    from `bias`, and `BIASES` lists what is split over a mesh and summed over the batch.
    """

    slopes: Float[Array, " K"] | None = None  # m
    self_bias: Float[Array, " K"] | None = None  # β
    segments: Int[Array, "*B J"] | None = None  # document ids: a position sees only its own

    def bias(self, distance_IN: Int[Array, "I N"], dtype: DTypeLike) -> Float[Array, "#K #I #N"]:
        """Return the bias of the scores of pairs `distance_IN` = i − j apart."""
        each_head = lambda x: x.astype(dtype)[:, None, None]
        bias_KIN = jnp.zeros((1, 1, 1), dtype)
        if self.slopes is not None:
            bias_KIN = bias_KIN - each_head(self.slopes) * distance_IN[None]
        if self.self_bias is not None:
            own_KIN = jnp.where(distance_IN[None] == 0, each_head(self.self_bias), 0.0)
            bias_KIN = bias_KIN + own_KIN
        return bias_KIN

    def bias_gradient(
        self, ds_KIN: Float[Array, "K I N"], distance_IN: Int[Array, "I N"]
    ) -> "Scores":
        """Return the gradients of the biases, given `ds_KIN`, the gradient of `bias`."""
        bias_KIN = lambda scores: jnp.broadcast_to(
            scores.bias(distance_IN, ds_KIN.dtype), ds_KIN.shape
        )
        return jax.vjp(bias_KIN, self)[1](ds_KIN)[0]


BIASES = tuple(name for name in Scores._fields if name != "segments")  # each [K]


def visible(
    distance_IN: Int[Array, "I N"],
    query_segments: Int[Array, "*B I"] | None,
    key_segments: Int[Array, "*B N"] | None,
) -> Bool[Array, "*#B #K I N"]:
    """Return which pairs `distance_IN` = i − j apart a query sees."""
    seen = distance_IN >= 0
    if query_segments is None:
        return seen
    same = query_segments[..., None, :, None] == key_segments[..., None, None, :]
    return in_front(seen, same.ndim) & same


def in_front(x: Shaped[Array, "..."], ndim: int) -> Shaped[Array, "..."]:
    """Return `x` with leading axes of size 1 added, up to `ndim` axes."""
    return jnp.expand_dims(x, range(ndim - x.ndim))


class Call(NamedTuple):
    """The arrays of one call; or their gradients, shapes or partitions."""

    q: Float[Array, "*B J K R"]
    k: Float[Array, "*B J K R"]
    v: Float[Array, "*B J K R"] | None = None  # None: the keys are the values
    g: Float[Array, "*B J D"] | Float[Array, "*B J K D"] | None = None  # d∘u, shared or per head
    h: Float[Array, "*B J D"] | None = None
    scores: Scores = Scores()

    @property
    def per_head(self) -> bool:
        """Return whether each head has its own g."""
        return self.g is not None and self.g.ndim == self.q.ndim

    @property
    def split(self) -> bool:
        """Return whether q and g hold only one device's part of the sequence's positions."""
        return self.q.shape[1] != self.k.shape[1]

    @property
    def floating(self) -> "Call":
        """Return the call without segments, so that every array has a gradient."""
        return self._replace(scores=self.scores._replace(segments=None))

    def map(self, f: Callable) -> "Call":
        """Apply `f` to those of q, k, v, g and h that are present."""
        arrays = {name: getattr(self, name) for name in ("q", "k", "v", "g", "h")}
        return self._replace(**{name: f(x) for name, x in arrays.items() if x is not None})

    def as_gradient_of(self, call: "Call") -> "Call":
        """Return these gradients, cast to the dtypes of the arrays of `call`."""
        return jax.tree.map(lambda x, y: x.astype(y.dtype), self, call.floating)


class Outputs(NamedTuple):
    """The outputs of a forward pass, in float32 or better; or the gradients of all three."""

    lse: Float[Array, "*B K J"]  # log Σ_j exp s_ijk
    o: Float[Array, "*B J K R"]  # Σ_j α_ijk v_jk, α the softmax of s over j
    a: Float[Array, "*B J D"] | Float[Array, "*B J K D"] | None  # `Options.average` of h


@dataclass(frozen=True)
class Options:
    """The static options of a call.

    `average` is the average of h to return as a: "none", "summed" over heads
    (Σ_k Σ_j α_ijk h_j), or "per_head". `block_sizes` are the positions per query and key block;
    None lets the implementation choose. `interpret` runs the TPU kernels in Pallas' interpreter:
    True, or its parameters. Raises ValueError for invalid values.
    """

    tau: float
    average: str = "none"
    implementation: str = "auto"
    block_sizes: tuple[int, int] | None = None
    interpret: Any = None

    def __post_init__(self):
        checked = dict(tau=_number(self.tau), block_sizes=_blocks(self.block_sizes))
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name, known in (("average", AVERAGES), ("implementation", IMPLEMENTATIONS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
        if self.interpret and self.implementation != "pallas":
            raise ValueError(
                f"interpret is for 'pallas'; implementation={self.implementation!r} is XLA"
            )

    @property
    def c(self) -> float:
        """Return 1/τ."""
        return 1.0 / self.tau


def _number(tau) -> float:
    """Return `tau` as a Python float, so that it never promotes an array's dtype."""
    if isinstance(tau, jax.core.Tracer):
        raise ValueError("tau is a number of the program, not traced: a static argument of its jit")
    if not float(tau) > 0:
        raise ValueError(f"tau must be positive; got {tau}")
    return float(tau)


def _blocks(sizes) -> tuple[int, int] | None:
    if sizes is None:
        return None
    try:
        queries, keys = map(operator.index, sizes)
    except (TypeError, ValueError):
        queries = keys = 0
    if min(queries, keys) < 1:
        raise ValueError(f"block_sizes must be two positive whole numbers; got {sizes!r}")
    return queries, keys


class Chunks(NamedTuple):
    """The queries of one device when a sequence's positions are split over devices.

    The keys are those of the whole sequence.
    """

    starts: tuple[tuple[int, int], ...]  # per device: first positions of its chunks, in array order
    length: int  # positions of a chunk
    device: Any  # index of this device; traced

    def own(self, tables: Sequence[ArrayLike]) -> Int[Array, "..."]:
        """Return this device's entry in a list with one entry per device."""
        return lax.dynamic_index_in_dim(np.stack(tables), self.device, keepdims=False)

    def blocks(self, size: int) -> list[np.ndarray]:
        """Return the first positions of each device's blocks of `size` queries."""
        cut = lambda start: np.arange(start, start + self.length, size, dtype=np.int32)
        return [np.concatenate([*map(cut, starts)]) for starts in self.starts]

    @property
    def end(self) -> Int[Array, ""]:
        """Return the first position that no query of this device sees."""
        return self.own([np.int32(max(starts) + self.length) for starts in self.starts])


class Implementation(NamedTuple):
    """One way to compute a call, as pure functions of arrays with one leading axis.

    An implementation that supports a subset of a sequence's queries takes their `Chunks` as the
    last argument of both passes.
    """

    forward: Callable[..., Outputs]  # (call, options)
    backward: Callable[..., Call]  # (call, options, outputs, gradients of these)
    obstacle: Callable[[Call, Options], str | None]  # why it cannot run a call; needs only shapes


def accumulator(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of scores, softmax and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def checked(call: Call) -> Call:
    """Convert array-likes to arrays of one floating dtype.

    Raises ValueError, naming the shapes, if they do not match.
    """
    given = {n: x for n, x in call._asdict().items() if x is not None and n != "scores"}
    call = call._replace(
        **{name: jnp.asarray(x) for name, x in given.items()},
        scores=Scores(*(None if x is None else jnp.asarray(x) for x in call.scores)),
    )
    q, k, v, g, h, scores = call
    if q.ndim < 3 or q.shape != k.shape:
        raise ValueError(f"q and k must both be [..., J, K, R]; got {q.shape} and {k.shape}")
    if v is not None and v.shape != k.shape:
        raise ValueError(f"v must be [..., J, K, R] like k {k.shape}; got {v.shape}")
    if not q.size:
        raise ValueError(f"q and k are empty: {q.shape}")
    *leading, positions, heads, _ = q.shape
    if (g is None) != (h is None):
        raise ValueError("g and h belong together: give both or neither")
    if h is not None:
        model_dim = h.shape[-1] if h.ndim else 0
        if h.shape != (*leading, positions, model_dim):
            raise ValueError(f"h must be [..., J, D] beside q {q.shape}; got {h.shape}")
        if g.shape not in (h.shape, (*leading, positions, heads, model_dim)):
            raise ValueError(
                f"g must be [..., J, D] or [..., J, K, D] beside h {h.shape}; got {g.shape}"
            )
    for name in BIASES:
        if (x := getattr(scores, name)) is not None and x.shape != (heads,):
            raise ValueError(f"{name} must be [K] = [{heads}]; got {x.shape}")
    segments = scores.segments
    if segments is not None and segments.shape != (*leading, positions):
        raise ValueError(f"segments must be [..., J] beside q {q.shape}; got {segments.shape}")
    if segments is not None and not jnp.issubdtype(segments.dtype, jnp.integer):
        raise ValueError(f"segments must be integers; got {segments.dtype}")
    dtype = jnp.result_type(*(getattr(call, name) for name in given))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"q, k, g, h must be floating; got {dtype}")
    return call.map(lambda x: x.astype(dtype))

"""What every implementation of the log-partition function takes, validated once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

CONTEXTS = ("none", "summed", "per_head")  # whether a = Σ_j p h_j is wanted, over heads


class Inputs(NamedTuple):
    """Arrays of one call. B leading axes · J positions · K heads · R head dim · D model dim."""

    q: jax.Array  # [B, J, K, R]
    k: jax.Array  # [B, J, K, R]
    v: jax.Array | None  # [B, J, K, R]; None: the keys are the values
    g: jax.Array | None  # d∘u: [B, J, D] shared by the heads, or [B, J, K, D]
    h: jax.Array | None  # [B, J, D]
    slopes: jax.Array | None  # m, [K]
    self_bias: jax.Array | None  # β, [K]
    segments: jax.Array | None  # document ids, [B, J]

    @property
    def split(self) -> bool:
        """Whether queries, q and g, are those of one device, some of the sequence's positions."""
        return self.q.shape[1] != self.k.shape[1]


class Plan(NamedTuple):
    """What is static in a call, the same for every implementation."""

    tau: float
    context: str = "none"  # of CONTEXTS
    blocks: tuple[int, int] | None = None  # positions of a query and a key block; None: chosen
    interpret: Any = None  # for Pallas: True, or the parameters of its interpreter


def accumulator(dtype) -> jnp.dtype:
    """Scores, softmax and sums: float32, or float64 where the inputs are."""
    return jnp.promote_types(dtype, jnp.float32)


def check_context(context: str) -> None:
    """Raises ValueError unless it is one of CONTEXTS."""
    if context not in CONTEXTS:
        raise ValueError(f"context must be one of {', '.join(CONTEXTS)}; got {context!r}")


def number(tau) -> float:
    """`tau` as a Python float, which no array is promoted by."""
    if isinstance(tau, jax.core.Tracer):
        raise ValueError("tau is a number of the program, not traced: a static argument of its jit")
    if not float(tau) > 0:
        raise ValueError(f"tau must be positive; got {tau}")
    return float(tau)


def validated(q, k, g=None, h=None, slopes=None, self_bias=None, segments=None, v=None) -> Inputs:
    """Array-likes as `Inputs`; raises ValueError with the shapes where they do not fit together."""
    raw = (q, k, v, g, h, slopes, self_bias, segments)
    inputs = Inputs(*(None if x is None else jnp.asarray(x) for x in raw))
    q, k, v, g, h, slopes, self_bias, segments = inputs
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
        if g.shape not in (
            (*leading, positions, model_dim),
            (*leading, positions, heads, model_dim),
        ):
            raise ValueError(
                f"g must be [..., J, D] or [..., J, K, D] beside h {h.shape}; got {g.shape}"
            )
    for name, value in (("slopes", slopes), ("self_bias", self_bias)):
        if value is not None and value.shape != (heads,):
            raise ValueError(f"{name} must be [K] = [{heads}]; got {value.shape}")
    if segments is not None and segments.shape != (*leading, positions):
        raise ValueError(f"segments must be [..., J] beside q {q.shape}; got {segments.shape}")
    if segments is not None and not jnp.issubdtype(segments.dtype, jnp.integer):
        raise ValueError(f"segments must be integers; got {segments.dtype}")
    dtype = jnp.result_type(*(x for x in (q, k, v, g, h) if x is not None))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"q, k, g, h must be floating; got {dtype}")
    q, k, v, g, h = (None if x is None else x.astype(dtype) for x in (q, k, v, g, h))
    return Inputs(q, k, v, g, h, slopes, self_bias, segments)

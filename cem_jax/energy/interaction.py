"""The interaction energy ε (Eq. 2, 12, App. B): weight-tied attention as its force.

    q_ik = W^Q_k u_i     k_jk = W^K_k h_j     g_i = d ∘ u_i
    s_ijk = ( k_jk·q_ik + g_i·h_j ) / τ − m_k (i−j) + β_k [i=j]
    ε(u_i | h_1:i) = −τ Σ_k log Σ_{j≤i} exp s_ijk

and its force, preconditioned (Eq. 3, 14), with α_ijk = softmax_j s_ijk:

    F_i = Σ_k P_k ( W^Q_kᵀ o_ik [ + d_k ∘ a_ik ] )     o_ik = Σ_j α_ijk k_jk    a_ik = Σ_j α_ijk h_j

The bracket is the diagonal's own gradient; Algorithm 1 leaves it out.

A layer works in query coordinates: −∂ε/∂q_ik = o_ik and −∂ε/∂g_ik = a_ik. P_k W^Q_kᵀ, one folded
weight, maps o back to the residual stream. In Algorithm 1's mode g is held fixed when the energy is
differentiated, but remains a function of u for training.

With rotary positions, q and k are rotated before their product, and o is rotated back. This is the
exact gradient, since W^Qᵀ rot(i)ᵀ Σ_j α rot(j) k_j = −∇_u ε.

Shapes: B leading axes · J positions (i query, j key) · D model dim · K heads · R head dim.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cem_jax.energy.arrays import same_dtype
from cem_jax.energy.position import Rotary, rotate
from cem_jax.energy.preconditioner import Preconditioner, precondition
from cem_jax.kernels import Call, Options, Scores, attend, attend_cached, total_log_partition
from cem_jax.kernels.call import BIASES
from cem_jax.sharding.linear import project, readout


class Keys(NamedTuple):
    """Everything ε takes from h and from positions; constant over the inner steps."""

    k: Float[Array, "*B J K R"]  # rotated, if positions are rotary
    h: Float[Array, "*B J D"] | None  # None: the interaction has no diagonal
    scores: Scores = Scores()
    rotary: Rotary | None = None  # of the queries
    start: Int[Array, ""] | int | None = None  # decoding (k, h are caches): first query's position


class Queries(NamedTuple):
    """Query coordinates, through which u enters the scores; or gradients with respect to them."""

    q: Float[Array, "*B J K R"]  # W^Q_k u
    g: Float[Array, "*B J D"] | Float[Array, "*B J K D"] | None = None  # d ∘ u


class Weights(NamedTuple):
    """Weights that map u to query coordinates, and the force back to the residual stream."""

    query: Float[Array, "K R D"]  # W^Q
    folded: Float[Array, "K R D"]  # W^Q_k P_k
    diagonal: Float[Array, "*K D"] | None = None  # d
    # P, for the diagonal's own gradient: in factors, or written out
    preconditioner: Preconditioner | Float[Array, "K D D"] | None = None


def heads_apart(
    x: Float[Array, "*B J D"], weight: Float[Array, "K R D"]
) -> Float[Array, "*B J K R"]:
    """Return W_k x for every head k."""
    heads, width, model_dim = weight.shape
    flat = project(x, weight.reshape(heads * width, model_dim))
    return flat.reshape(*x.shape[:-1], heads, width)


def heads_together(
    o: Float[Array, "*B J K R"], weight: Float[Array, "K R D"]
) -> Float[Array, "*B J D"]:
    """Return Σ_k W_kᵀ o_k."""
    heads, width, model_dim = weight.shape
    return readout(
        o.reshape(*o.shape[:-2], heads * width), weight.reshape(heads * width, model_dim)
    )


def diagonal_coordinates(
    u: Float[Array, "*B J D"], diagonal: Float[Array, "*K D"]
) -> Float[Array, "*B J D"] | Float[Array, "*B J K D"]:
    """Return g = d ∘ u: [*B J D] for one d, [*B J K D] for one per head."""
    if diagonal.ndim == 2:
        u = u[..., None, :]
    return u * jnp.expand_dims(diagonal.astype(u.dtype), range(u.ndim - diagonal.ndim))


def queries_of(u: Float[Array, "*B J D"], weights: Weights) -> Queries:
    """Return the query coordinates of u."""
    d = weights.diagonal
    g = None if d is None else diagonal_coordinates(u, d)
    return Queries(heads_apart(u, weights.query), g)


def keys_of(
    h: Float[Array, "*B J D"],
    key: Float[Array, "K R D"],
    *,
    diagonal: bool,
    scores: Scores = Scores(),  # noqa: B008 - immutable
    rotary: Rotary | None = None,
) -> Keys:
    """Return the keys, with h itself if `diagonal`."""
    return Keys(rotate(heads_apart(h, key), rotary), h if diagonal else None, scores, rotary)


def folded_weights(
    query: Float[Array, "K R D"], diagonal: Float[Array, "*K D"] | None, p: Preconditioner | None
) -> Weights:
    """Return a layer's weights with P folded in: [D], or [K, D], leads the factors of `p`."""
    return Weights(query, precondition(query, p), diagonal, p)


def _call(queries: Queries, keys: Keys) -> Call:
    q = rotate(queries.q, keys.rotary)
    return Call(q=q, k=keys.k, g=queries.g, h=keys.h, scores=keys.scores)


def energy_of_query(queries: Queries, keys: Keys, options: Options) -> Float[Array, "*B J"]:
    """Return ε in query coordinates."""
    lse_BJ = total_log_partition(_call(queries, keys), options)
    return (-options.tau * lse_BJ).astype(lse_BJ.dtype)


def attention_statistics(
    queries: Queries, keys: Keys, options: Options
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the entropy of α, in nats, and α_ii, each averaged over heads and positions.

    Both are derivatives of the log-partition function, so α is never materialized: with all
    scores multiplied by b, −Σ_j α_ij ln α_ij = lse_i − ∂lse_i/∂b at b = 1; and α_ii = ∂lse_i/∂β.
    """
    heads = keys.k.shape[-2]
    dtype = jnp.promote_types(queries.q.dtype, jnp.float32)
    call = _call(queries, keys)
    scores = call.scores
    if scores.self_bias is None:
        scores = scores._replace(self_bias=jnp.zeros(heads, dtype))
    biases = {n: jnp.asarray(x) for n in BIASES if (x := getattr(scores, n)) is not None}

    def mean_log_partition(b, extra_K):
        times_b = lambda x: None if x is None else b.astype(x.dtype) * x
        scaled = {name: times_b(x) for name, x in biases.items()}
        scaled["self_bias"] += extra_K
        moved = call._replace(
            q=times_b(call.q), g=times_b(call.g), scores=scores._replace(**scaled)
        )
        return total_log_partition(moved, options).mean() / heads

    start = jnp.ones((), dtype), jnp.zeros(heads, dtype)
    mean, (mean_score, masses_K) = jax.value_and_grad(mean_log_partition, argnums=(0, 1))(*start)
    return mean - mean_score, masses_K.sum()


def force_on_query(
    queries: Queries, keys: Keys, options: Options, *, diagonal_in_update: bool, update: str
) -> Queries:
    """Return (o, a) = −∂ε/∂(q, g), in the dtype of q; a is None unless `diagonal_in_update`.

    update="autodiff" takes `jax.grad` of the energy, "closed_form" calls the attention kernel.
    With a cache, the force is always in closed form.
    """
    q, g = queries
    if update == "autodiff" and keys.start is None:
        # in Algorithm 1's mode g is held fixed here, but remains a function of u for training
        energy = lambda moved: energy_of_query(moved, keys, options).sum()
        if diagonal_in_update:
            return jax.tree.map(jnp.negative, jax.grad(energy)(queries))
        return Queries(-jax.grad(lambda q: energy(Queries(q, g)))(q))
    if diagonal_in_update:
        options = replace(options, average="per_head" if g.ndim == q.ndim else "summed")
    call = _call(queries, keys)
    if keys.start is None:
        _, o, a = attend(call, options)
    else:
        _, o, a = attend_cached(call, options, keys.start)
    o = rotate(o.astype(q.dtype), keys.rotary, inverse=True)
    return Queries(o, None if a is None else a.astype(q.dtype))


def force_on_state(
    u: Float[Array, "*B J D"],
    keys: Keys,
    weights: Weights,
    options: Options,
    *,
    diagonal_in_update: bool,
    update: str,
) -> Float[Array, "*B J D"]:
    """Return F(u) = Σ_k P_k ( W^Q_kᵀ o_k [ + d_k ∘ a_k ] ) (Eq. 3, 14).

    `diagonal_in_update` adds the bracket if there is a diagonal. Only the bracket uses
    `weights.preconditioner`; with one P per head it is computed for each head, which takes K times
    the memory. `update` is as in `force_on_query`.
    """
    d, p = weights.diagonal, weights.preconditioner
    diagonal_in_update = diagonal_in_update and d is not None
    written_out = p is not None and not isinstance(p, Preconditioner)
    per_head = diagonal_in_update and (written_out or (p is not None and p.diagonal.ndim == 2))
    if per_head and d.ndim == 1:
        d = jnp.broadcast_to(d, (weights.query.shape[0], *d.shape))
    queries = queries_of(u, weights._replace(diagonal=d))
    o_BJKR, a = force_on_query(
        queries, keys, options, diagonal_in_update=diagonal_in_update, update=update
    )
    force = heads_together(o_BJKR, weights.folded)
    if not diagonal_in_update:
        return force
    own = a * jnp.expand_dims(d.astype(a.dtype), range(a.ndim - d.ndim))
    if written_out:
        return force + jnp.einsum("...kd,ked->...e", own, p)
    if per_head:
        return force + jax.vmap(precondition, in_axes=(-2, 0))(own, p).sum(0)
    own = own.sum(-2) if d.ndim == 2 else own
    return force + precondition(own, p)


def _prepared(u, h, query, key, diagonal, rotary, scores: Scores):
    """Return (u, query, diagonal, keys), with all arrays in one dtype.

    Raises ValueError if the shapes do not match.
    """
    u, h, query, key, diagonal = same_dtype(u, h, query, key, diagonal)
    if u.shape != h.shape or u.ndim < 2:
        raise ValueError(f"u and h must both be [..., J, D]; got {u.shape} and {h.shape}")
    model_dim = u.shape[-1]
    if query.shape != key.shape or query.ndim != 3 or query.shape[-1] != model_dim:
        raise ValueError(
            f"query and key must both be [K, R, D] with D = {model_dim}; "
            f"got {query.shape} and {key.shape}"
        )
    heads = query.shape[0]
    if diagonal is not None and diagonal.shape not in ((model_dim,), (heads, model_dim)):
        raise ValueError(
            f"diagonal must be [D] = [{model_dim}] or [K, D] = [{heads}, {model_dim}]; "
            f"got {diagonal.shape}"
        )
    rotary = None if rotary is None else Rotary(*rotary)
    keys = keys_of(h, key, diagonal=diagonal is not None, scores=scores, rotary=rotary)
    return u, query, diagonal, keys


def interaction_energy(
    u: Float[Array, "*B J D"],
    h: Float[Array, "*B J D"],
    query: Float[Array, "K R D"],
    key: Float[Array, "K R D"],
    *,
    tau: float,
    diagonal: Float[Array, "*K D"] | None = None,
    slopes: Float[Array, " K"] | None = None,
    self_bias: Float[Array, " K"] | None = None,
    rotary: Rotary | None = None,
    segments: Int[Array, "*B J"] | None = None,
    implementation: str = "dense",
) -> Float[Array, "*B J"]:
    """Return ε(u_i | h_1:i) (Eq. 2, 12, App. B), in float32 or better.

    `diagonal`: d, [D] or [K, D]. `slopes`, `self_bias`: m and β, [K]. `rotary`: positions and base.
    `segments`: document ids; a position sees only its own document. ∂ε is with respect to u alone:
    h, including h_i, is held fixed. Raises ValueError if the shapes do not match.
    """
    scores = Scores(slopes, self_bias, segments)
    u, query, diagonal, keys = _prepared(u, h, query, key, diagonal, rotary, scores)
    queries = queries_of(u, Weights(query, query, diagonal))
    return energy_of_query(queries, keys, Options(tau, implementation=implementation))


def interaction_force(
    u: Float[Array, "*B J D"],
    h: Float[Array, "*B J D"],
    query: Float[Array, "K R D"],
    key: Float[Array, "K R D"],
    *,
    tau: float,
    diagonal: Float[Array, "*K D"] | None = None,
    slopes: Float[Array, " K"] | None = None,
    self_bias: Float[Array, " K"] | None = None,
    rotary: Rotary | None = None,
    segments: Int[Array, "*B J"] | None = None,
    implementation: str = "dense",
    diagonal_in_update: bool = False,
    preconditioner: Float[Array, "K D D"] | None = None,
) -> Float[Array, "*B J D"]:
    """Return F_i = Σ_k P_k (W^Q_kᵀ o_ik [ + d_k ∘ a_ik ]) (Eq. 3, 14), in closed form.

    `diagonal_in_update` adds the bracket; with it and without P, the force is −∂ε/∂u.
    `preconditioner`: every P_k as a full matrix. Other arguments as in `interaction_energy`.
    """
    scores = Scores(slopes, self_bias, segments)
    u, query, diagonal, keys = _prepared(u, h, query, key, diagonal, rotary, scores)
    p_KDD, folded = None, query
    if preconditioner is not None:
        heads, _, model_dim = query.shape
        p_KDD = jnp.asarray(preconditioner).astype(u.dtype)
        if p_KDD.shape != (heads, model_dim, model_dim):
            raise ValueError(
                f"preconditioner must be [K, D, D] = [{heads}, {model_dim}, {model_dim}]; "
                f"got {p_KDD.shape}"
            )
        folded = jnp.einsum("ked,krd->kre", p_KDD, query)
    return force_on_state(
        u,
        keys,
        Weights(query, folded, diagonal, p_KDD),
        Options(tau, implementation=implementation),
        diagonal_in_update=diagonal_in_update,
        update="closed_form",
    )

"""The interaction energy ε (Eq. 2, 12, App. B): weight-tied attention as its force.

    q_ik = W^Q_k u_i     k_jk = W^K_k h_j     g_i = d ∘ u_i
    s_ijk = ( k_jk·q_ik + g_i·h_j ) / τ − m_k (i−j) + β_k [i=j]
    ε(u_i | h_1:i) = −τ Σ_k log Σ_{j≤i} exp s_ijk

and its force, preconditioned (Eq. 3, 14), with α_ijk = softmax_j s_ijk:

    F_i = Σ_k P_k ( W^Q_kᵀ o_ik [ + d_k ∘ a_ik ] )     o_ik = Σ_j α_ijk k_jk    a_ik = Σ_j α_ijk h_j

The bracket is the diagonal's own gradient; Algorithm 1 leaves it out.

A layer works in query coordinates: −∂ε/∂q_ik = o_ik and −∂ε/∂g_ik = a_ik. P_k W^Q_kᵀ, one folded
weight, carries o back to the residual stream. In Algorithm 1's mode g is held where the energy is
differentiated, yet stays a function of u for training.

With rotary positions q and k are turned before they meet, and o turned back: the exact gradient,
since W^Qᵀ rot(i)ᵀ Σ_j α rot(j) k_j = −∇_u ε.

Shapes: B leading axes · J positions (i query, j key) · D model dim · K heads · R head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cem_jax.energy.arrays import same_dtype
from cem_jax.energy.position import Rotary, rotate
from cem_jax.energy.preconditioner import Preconditioner, precondition
from cem_jax.kernels import attend, attend_cached, total_log_partition
from cem_jax.sharding.linear import project, readout


class Context(NamedTuple):
    """What ε's scores take from h and from positions; fixed over the steps."""

    k: Float[Array, "*B J K R"]  # turned, where positions are rotary
    h: Float[Array, "*B J D"] | None  # None: the interaction has no diagonal
    slopes: Float[Array, " K"] | None = None
    self_bias: Float[Array, " K"] | None = None
    rotary: Rotary | None = None
    segments: Int[Array, "*B J"] | None = None
    start: Int[Array, ""] | None = None  # decoding: k and h are caches, the first query is here


def heads_apart(
    x: Float[Array, "*B J D"], weight: Float[Array, "K R D"]
) -> Float[Array, "*B J K R"]:
    """W_k x for every head k."""
    heads, width, model_dim = weight.shape
    flat = project(x, weight.reshape(heads * width, model_dim))
    return flat.reshape(*x.shape[:-1], heads, width)


def heads_together(
    o: Float[Array, "*B J K R"], weight: Float[Array, "K R D"]
) -> Float[Array, "*B J D"]:
    """Σ_k W_kᵀ o_k."""
    heads, width, model_dim = weight.shape
    return readout(
        o.reshape(*o.shape[:-2], heads * width), weight.reshape(heads * width, model_dim)
    )


def energy_of_query(q, g, context: Context, *, tau: float, **kernel) -> Float[Array, "*B J"]:
    """ε in query coordinates: q [*B J K R], g [*B J D], [*B J K D] or None."""
    lse_BJ = total_log_partition(
        rotate(q, context.rotary),
        context.k,
        g,
        context.h,
        tau=tau,
        slopes=context.slopes,
        self_bias=context.self_bias,
        segments=context.segments,
        **kernel,
    )
    return (-tau * lse_BJ).astype(lse_BJ.dtype)


def attention_statistics(q, g, context: Context, *, tau: float, **kernel) -> tuple[Array, Array]:
    """Means over heads and positions of α's entropy, in nats, and of α_ii: two scalars.

    Both are derivatives of the log-partition function, so that no α is written out: with all
    scores times b, −Σ_j α_ij ln α_ij = lse_i − ∂lse_i/∂b at b = 1; and α_ii = ∂lse_i/∂β.
    """
    heads = context.k.shape[-2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    times = lambda b, x: None if x is None else b.astype(x.dtype) * x
    own_K = jnp.zeros(heads, dtype) if context.self_bias is None else context.self_bias

    def mean_log_partition(b, extra_K):
        lse_BJ = total_log_partition(
            times(b, rotate(q, context.rotary)),
            context.k,
            times(b, g),
            context.h,
            tau=tau,
            slopes=None if context.slopes is None else times(b, jnp.asarray(context.slopes)),
            self_bias=times(b, own_K) + extra_K,
            segments=context.segments,
            **kernel,
        )
        return lse_BJ.mean() / heads

    start = jnp.ones((), dtype), jnp.zeros(heads, dtype)
    mean, (mean_score, masses_K) = jax.value_and_grad(mean_log_partition, argnums=(0, 1))(*start)
    return mean - mean_score, masses_K.sum()


def force_on_query(q, g, context: Context, *, exact: bool, update: str, tau: float, **kernel):
    """(o, a) = −∂ε/∂(q, g), in the dtype of `q`; a is None unless `exact`.

    update="autodiff" asks `jax.grad` of the energy, "closed_form" the attention kernel. Over a
    cache the force is always the closed form.
    """
    shape = "none" if not exact else "per_head" if g.ndim == q.ndim else "summed"
    scores = dict(tau=tau, slopes=context.slopes, self_bias=context.self_bias)
    if context.start is not None:
        turned = rotate(q, context.rotary)
        o, a = attend_cached(
            turned, context.k, g, context.h, start=context.start, context=shape, **scores
        )
        return _in_query_coordinates(o, a, q, context)
    if update == "autodiff":
        if not exact:
            energy = lambda q: energy_of_query(q, g, context, tau=tau, **kernel).sum()
            return -jax.grad(energy)(q), None
        energy = lambda q, g: energy_of_query(q, g, context, tau=tau, **kernel).sum()
        return jax.tree.map(jnp.negative, jax.grad(energy, argnums=(0, 1))(q, g))
    _, o, a = attend(
        rotate(q, context.rotary),
        context.k,
        g,
        context.h,
        segments=context.segments,
        context=shape,
        **scores,
        **kernel,
    )
    return _in_query_coordinates(o, a, q, context)


def _in_query_coordinates(o, a, q, context: Context):
    o = rotate(o.astype(q.dtype), context.rotary, inverse=True)
    return o, None if a is None else a.astype(q.dtype)


def diagonal_coordinates(u: Float[Array, "*B J D"], diagonal: Float[Array, "*K D"]) -> Array:
    """g = d ∘ u: [*B J D] for one d, [*B J K D] for one a head."""
    if diagonal.ndim == 2:
        u = u[..., None, :]
    return u * jnp.expand_dims(diagonal.astype(u.dtype), range(u.ndim - diagonal.ndim))


def force_on_state(
    u: Float[Array, "*B J D"],
    context: Context,
    query: Float[Array, "K R D"],
    folded: Float[Array, "K R D"],
    diagonal: Float[Array, "*K D"] | None,
    preconditioner: Preconditioner | None = None,
    *,
    exact: bool,
    **how,
) -> Float[Array, "*B J D"]:
    """F(u), for a layer: `folded` is W^Q_k P_k, the query weight with the preconditioner in it.

    `exact` adds the diagonal's own gradient; only there is `preconditioner` used ([D] or [K, D]
    leading its factors). One P a head needs that gradient head by head: K times the memory.
    `how`: update, tau and the kernel's implementation.
    """
    heads = query.shape[0]
    per_head = exact and preconditioner is not None and preconditioner.diagonal.ndim == 2
    if per_head and diagonal.ndim == 1:
        diagonal = jnp.broadcast_to(diagonal, (heads, *diagonal.shape))
    g = None if diagonal is None else diagonal_coordinates(u, diagonal)
    o_BJKR, a = force_on_query(heads_apart(u, query), g, context, exact=exact, **how)
    force = heads_together(o_BJKR, folded)
    if not exact:
        return force
    own = a * jnp.expand_dims(diagonal.astype(a.dtype), range(a.ndim - diagonal.ndim))
    if per_head:
        return force + jax.vmap(precondition, in_axes=(-2, 0))(own, preconditioner).sum(0)
    own = own.sum(-2) if diagonal.ndim == 2 else own
    return force + precondition(own, preconditioner)


def context_of(
    h: Float[Array, "*B J D"],
    key: Float[Array, "K R D"],
    *,
    diagonal: bool,
    slopes=None,
    self_bias=None,
    rotary: Rotary | None = None,
    segments=None,
) -> Context:
    """Keys and what else of h enters ε."""
    k_BJKR = rotate(heads_apart(h, key), rotary)
    return Context(k_BJKR, h if diagonal else None, slopes, self_bias, rotary, segments)


def _fitting(u, h, query, key, diagonal):
    """The arrays again; raises ValueError where their shapes do not fit together."""
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
    return u, h, query, key, diagonal


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
    """ε(u_i | h_1:i) (Eq. 2, 12, App. B), in float32 or better.

    `diagonal`: d, [D] or [K, D]. `slopes`, `self_bias`: m and β, [K]. `rotary`: positions and base.
    `segments`: document ids; a position sees its own document only. ∂ε is with respect to u alone:
    h, h_i included, is held. Raises ValueError on shapes that do not fit.
    """
    u, h, query, key, diagonal = _fitting(*same_dtype(u, h, query, key, diagonal))
    context = context_of(
        h,
        key,
        diagonal=diagonal is not None,
        slopes=slopes,
        self_bias=self_bias,
        rotary=None if rotary is None else Rotary(*rotary),
        segments=segments,
    )
    g = None if diagonal is None else diagonal_coordinates(u, diagonal)
    q_BJKR = heads_apart(u, query)
    return energy_of_query(q_BJKR, g, context, tau=tau, implementation=implementation)


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
    """F_i = Σ_k P_k (W^Q_kᵀ o_ik [ + d_k ∘ a_ik ]) (Eq. 3, 14), in closed form, P written out.

    `diagonal_in_update` adds the bracket; with it and without P the force is −∂ε/∂u. Other
    arguments as in `interaction_energy`.
    """
    u, h, query, key, diagonal = _fitting(*same_dtype(u, h, query, key, diagonal))
    exact = diagonal_in_update and diagonal is not None
    context = context_of(
        h,
        key,
        diagonal=diagonal is not None,
        slopes=slopes,
        self_bias=self_bias,
        rotary=None if rotary is None else Rotary(*rotary),
        segments=segments,
    )
    if exact and diagonal.ndim == 1:
        diagonal = jnp.broadcast_to(diagonal, (query.shape[0], *diagonal.shape))
    g = None if diagonal is None else diagonal_coordinates(u, diagonal)
    o_BJKR, a_BJKD = force_on_query(
        heads_apart(u, query),
        g,
        context,
        exact=exact,
        update="closed_form",
        tau=tau,
        implementation=implementation,
    )
    by_head = jnp.einsum("...kr,krd->...kd", o_BJKR, query)
    if exact:
        by_head += a_BJKD * jnp.expand_dims(diagonal, range(by_head.ndim - 2))
    if preconditioner is None:
        return by_head.sum(-2)
    heads, _, model_dim = query.shape
    p_KDD = jnp.asarray(preconditioner).astype(u.dtype)
    if p_KDD.shape != (heads, model_dim, model_dim):
        raise ValueError(
            f"preconditioner must be [K, D, D] = [{heads}, {model_dim}, {model_dim}]; "
            f"got {p_KDD.shape}"
        )
    return jnp.einsum("...kd,ked->...e", by_head, p_KDD)

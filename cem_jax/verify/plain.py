"""The oracle of `cem verify`: the model again, straight from Algorithm 1 and the equations.

Scores and preconditioners are full matrices, steps and layers are Python loops, derivatives are
JAX's own, and no formula comes from `kernels`, `energy` or `model`. One sequence at a time.

Shapes: J positions (i query, j key) · D model dim · K heads · R head dim · M MLP dim · S rank ·
V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm as normal
from jaxtyping import Array, Float, Int

from cem_jax.config import ModelConfig
from cem_jax.energy.activation import activation as library_activation

Parameters = dict[str, Any]
States = Float[Array, "J D"]
Segments = Int[Array, " J"] | None

_SIGMA = {
    "silu": lambda x: x / (1.0 + jnp.exp(-x)),
    "gelu": lambda x: x * normal.cdf(x),
    "relu": lambda x: jnp.where(x > 0, x, 0.0),
}


def sigma(name: str) -> Callable[[Float[Array, "*N"]], Float[Array, "*N"]]:
    """Return σ as written here, or else the library's, whose φ can still be checked against it."""
    return _SIGMA[name] if name in _SIGMA else library_activation(name).sigma


def logits(
    parameters: Parameters, tokens_J: Int[Array, " J"], segments_J: Segments, c: ModelConfig
) -> Float[Array, "J V"]:
    """Return the logits of one sequence."""
    x_JD = parameters["embedding"][tokens_J]
    for layer in range(c.layers):
        block = jax.tree.map(lambda leaf, i=layer: leaf[i], parameters["blocks"])
        x_JD = attention(x_JD, block["attention"], segments_J, c)
        x_JD = mlp(x_JD, block["mlp"], c)
    head_VD = parameters["embedding"] if c.tie_embeddings else parameters["head"]
    return norm(x_JD, parameters["norm"], c.norm_eps) @ head_VD.T


def attention(x_JD: States, p: Parameters, segments_J: Segments, c: ModelConfig) -> States:
    """Return x after the attention sublayer: T steps of Eq. 16, or Llama's attention T times."""
    if c.attention.kind == "llama":
        for _ in range(c.attention.steps):
            x_JD = _llama_attention(x_JD, p, segments_J, c)
        return x_JD
    h_JD = norm(x_JD, p["norm"], c.norm_eps)
    state_JD = x_JD if c.residual == "prenorm" else h_JD
    for _ in range(c.attention.steps):
        state_JD = attention_step(state_JD, h_JD, p, segments_J, c)
    return state_JD


def mlp(x_JD: States, p: Parameters, c: ModelConfig) -> States:
    """Return x after the MLP sublayer: T steps of Eq. 17, or the gated MLP T times."""
    if c.mlp.kind == "gated":
        for _ in range(c.mlp.steps):
            x_JD = _gated_mlp(x_JD, p, c)
        return x_JD
    h_JD = norm(x_JD, p["norm"], c.norm_eps)
    state_JD = x_JD if c.residual == "prenorm" else h_JD
    for _ in range(c.mlp.steps):
        state_JD = mlp_step(state_JD, h_JD, p, c)
    return state_JD


# Each step is jitted by itself, so that the loops over steps and layers compile it only once.


@partial(jax.jit, static_argnames="c")
def attention_step(
    x_JD: States, h_JD: States, p: Parameters, segments_J: Segments, c: ModelConfig
) -> States:
    """Return x + η F(u) of the interaction energy."""
    force_JD = interaction_force(_state_norm(x_JD, p, c), h_JD, p, segments_J, c)
    eta = p.get("eta", c.attention.step_size)
    return x_JD + eta * _through_norm(force_JD, x_JD, p, c)


@partial(jax.jit, static_argnames="c")
def mlp_step(x_JD: States, h_JD: States, p: Parameters, c: ModelConfig) -> States:
    """Return x + η F(u) of the element-wise energy."""
    force_JD = elementwise_force(_state_norm(x_JD, p, c), h_JD, p, c)
    return x_JD + p.get("eta", c.mlp.step_size) * _through_norm(force_JD, x_JD, p, c)


@partial(jax.jit, static_argnames="c")
def interaction_force(
    u_JD: States, h_JD: States, p: Parameters, segments_J: Segments, c: ModelConfig
) -> States:
    """Return Σ_k P_k (W^Q_kᵀ o_k [ + d_k ∘ Σ_j α_k h_j ]) (Eq. 3, 14), [J, D]."""
    exact = c.attention.diagonal_in_update

    def force_of(head: Parameters):
        s_JJ, k_JR = _scores(u_JD, h_JD, head, segments_J, c)
        alpha_JJ = jax.nn.softmax(s_JJ, axis=-1)
        o_JR = _turn(alpha_JJ @ k_JR, c, back=True)
        force_JD = o_JR @ head["query"]
        if exact and "diagonal" in head:
            force_JD += head["diagonal"][None] * (alpha_JJ @ h_JD)
        return force_JD @ preconditioner(head, c.dim) if "p" in head else force_JD

    # one head at a time, so that only one explicit P is in memory
    return jax.lax.map(jax.checkpoint(force_of), _heads(p, c)).sum(0)


@partial(jax.jit, static_argnames="c")
def interaction_energy(
    u_JD: States, h_JD: States, p: Parameters, segments_J: Segments, c: ModelConfig
) -> Float[Array, " J"]:
    """Return ε = −τ Σ_k log Σ_j exp s_ijk (Eq. 2, 12), [J]."""
    heads = _heads(p, c)
    lse_KJ = jax.lax.map(
        lambda head: jax.nn.logsumexp(_scores(u_JD, h_JD, head, segments_J, c)[0], axis=-1), heads
    )
    return -c.tau * lse_KJ.sum(0)


@partial(jax.jit, static_argnames="c")
def elementwise_force(u_JD: States, h_JD: States, p: Parameters, c: ModelConfig) -> States:
    """Return P tiedᵀ (γ ∘ σ(tied u)) (Eq. 15), [J, D]."""
    gamma_JM, z_JM = h_JD @ p["multiplier"].T, u_JD @ p["tied"].T
    force_JD = (gamma_JM * sigma(c.mlp.activation)(z_JM)) @ p["tied"]
    if "preconditioner" in p:
        force_JD = force_JD @ preconditioner(p["preconditioner"], c.dim)
    return force_JD


def elementwise_energy(
    u_JD: States, h_JD: States, p: Parameters, c: ModelConfig
) -> Float[np.ndarray, " J"]:
    """Return ξ = −γ·φ(tied u) (Eq. 7), with φ by quadrature, [J]."""
    u_JD, h_JD, multiplier_MD, tied_MD = map(np.asarray, (u_JD, h_JD, p["multiplier"], p["tied"]))
    phi_JM = antiderivative(c.mlp.activation, u_JD @ tied_MD.T)
    return -np.sum((h_JD @ multiplier_MD.T) * phi_JM, axis=-1)


def antiderivative(name: str, x: np.ndarray) -> np.ndarray:
    """Return φ(x) = ∫σ from −∞ to x, by quadrature in float64; σ may have a kink at 0."""
    x = np.asarray(x, np.float64)
    below, above = np.minimum(x, 0.0), np.maximum(x, 0.0)
    function = jax.jit(sigma(name))
    # the integral from −∞ to −45 is below 1e-17
    return _integral(function, below - 45.0, below) + _integral(function, np.zeros_like(x), above)


def _integral(function, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Integrate a function from `low` to `high` by Gauss–Legendre, in panels of length 4 at most.

    The nearest poles of σ, at ±iπ for SiLU, are far enough away for 20 nodes to be exact.
    """
    nodes, weights = np.polynomial.legendre.leggauss(20)
    panels = int(np.ceil((high - low).max(initial=1.0) / 4.0))
    half = (high - low) / (2 * panels)
    total = np.zeros_like(low)
    for panel in range(panels):
        for node, weight in zip(nodes, weights, strict=True):
            total += weight * np.asarray(function(low + half * (2 * panel + 1 + node)))
    return half * total


def preconditioner(factors: Parameters, dim: int) -> Float[Array, "D D"]:
    """Return P = diag(softplus(p√D)) + left·rightᵀ + right·leftᵀ, or + left·leftᵀ (Eq. 13)."""
    matrix_DD = jnp.diag(jnp.log1p(jnp.exp(factors["p"] * np.sqrt(dim))))
    if "left" in factors:
        left_DS = factors["left"]
        right_DS = factors.get("right", 0.5 * left_DS)
        matrix_DD += left_DS @ right_DS.T + right_DS @ left_DS.T
    return matrix_DD


def norm(x_JD: States, weight_D: Float[Array, " D"] | None, eps: float) -> States:
    """Return x / √(mean x² + eps), times the weight if there is one."""
    u_JD = x_JD / jnp.sqrt(jnp.mean(x_JD**2, axis=-1, keepdims=True) + eps)
    return u_JD if weight_D is None else u_JD * weight_D[None]


def slopes(scheme: str, heads: int) -> np.ndarray:
    """Return ALiBi's m_k, [K], rounded to float32 as they are stored."""
    k = np.arange(1, heads + 1)
    if scheme == "power_of_two":
        return (0.5**k).astype(np.float32)
    below = 1 << (heads.bit_length() - 1)
    whole = [2.0 ** (-8.0 * n / below) for n in range(1, below + 1)]
    between = [2.0 ** (-4.0 * n / below) for n in range(1, 2 * below + 1, 2)]
    return np.array((whole + between)[:heads], np.float32)


def _scores(u_JD, h_JD, head: Parameters, segments_J, c: ModelConfig):
    """Return s_ijk of one head, −∞ where i does not see j, and its rotated keys: [J, J], [J, R]."""
    q_JR, k_JR = _turn(u_JD @ head["query"].T, c), _turn(h_JD @ head["key"].T, c)
    s_JJ = q_JR @ k_JR.T
    if "diagonal" in head:
        s_JJ += (u_JD * head["diagonal"][None]) @ h_JD.T
    return _biased(s_JJ / c.tau, head, segments_J), k_JR


def _biased(s_JJ, head: Parameters, segments_J):
    positions = np.arange(s_JJ.shape[0])
    distance_JJ = positions[:, None] - positions[None, :]
    if "slope" in head:
        s_JJ -= head["slope"] * distance_JJ
    if "self_bias" in head:
        s_JJ += head["self_bias"] * np.eye(len(positions))
    seen_JJ = distance_JJ >= 0
    if segments_J is not None:
        seen_JJ = seen_JJ & (segments_J[:, None] == segments_J[None, :])
    return jnp.where(seen_JJ, s_JJ, -jnp.inf)


def _heads(p: Parameters, c: ModelConfig) -> Parameters:
    """Return the parameters per head, with a leading head axis; shared ones are repeated."""
    a = c.attention
    over_heads = lambda x, rank: x if x.ndim == rank else jnp.stack([x] * a.heads)
    heads = {name: p[name] for name in ("query", "key", "value", "output") if name in p}
    if "diagonal" in p:
        heads["diagonal"] = over_heads(p["diagonal"], 2)
    if "self_bias" in p:
        heads["self_bias"] = p["self_bias"]
    if a.position == "alibi":
        heads["slope"] = jnp.asarray(slopes(a.alibi_slopes, a.heads), p["query"].dtype)
    ranks = {"p": 2, "left": 3, "right": 3}
    for name, factor in p.get("preconditioner", {}).items():
        heads[name] = over_heads(factor, ranks[name])
    return heads


def _turn(x_JR, c: ModelConfig, back: bool = False):
    """Return rot(i) x_i or rot(i)ᵀ x_i: pairs (r, r + R/2) as complex numbers turn by ±i·θ_r."""
    if c.attention.position != "rope":
        return x_JR
    positions, width = x_JR.shape
    theta = c.attention.rope_base ** (-2.0 * np.arange(width // 2) / width)
    angle = np.arange(positions)[:, None] * theta[None] * (-1.0 if back else 1.0)
    turned = jax.lax.complex(x_JR[:, : width // 2], x_JR[:, width // 2 :]) * np.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


@partial(jax.jit, static_argnames="c")
def _llama_attention(x_JD, p: Parameters, segments_J, c: ModelConfig):
    h_JD = norm(x_JD, p["norm"], c.norm_eps)

    def output_of(head: Parameters):
        s_JJ, _ = _scores(h_JD, h_JD, head, segments_J, c)
        return jax.nn.softmax(s_JJ, axis=-1) @ (h_JD @ head["value"].T) @ head["output"]

    return x_JD + jax.lax.map(output_of, _heads(p, c)).sum(0)


@partial(jax.jit, static_argnames="c")
def _gated_mlp(x_JD, p: Parameters, c: ModelConfig):
    h_JD = norm(x_JD, p["norm"], c.norm_eps)
    hidden_JM = sigma(c.mlp.activation)(h_JD @ p["gate"].T) * (h_JD @ p["up"].T)
    return x_JD + hidden_JM @ p["down"]


def step_weight(p: Parameters, c: ModelConfig) -> Float[Array, " D"] | None:
    """Return the weight of the norm inside the recursion."""
    return {"shared": p["norm"], "separate": p.get("step_norm")}.get(c.step_norm)


def _state_norm(x_JD, p: Parameters, c: ModelConfig):
    return x_JD if c.step_norm == "none" else norm(x_JD, step_weight(p, c), c.norm_eps)


def _through_norm(force_JD, x_JD, p: Parameters, c: ModelConfig):
    """Return the force on x from the force at u: itself, weight ∘ force, or (∂u/∂x)ᵀ force."""
    if c.step_norm == "none" or c.norm_gradient == "at_u":
        return force_JD
    weight_D = step_weight(p, c)
    if weight_D is not None:
        force_JD = force_JD * weight_D[None]
    if c.norm_gradient == "scaled":
        return force_JD
    r_J1 = jnp.sqrt(jnp.mean(x_JD**2, axis=-1, keepdims=True) + c.norm_eps)
    along_J1 = jnp.mean(x_JD * force_JD, axis=-1, keepdims=True)
    return force_JD / r_J1 - x_JD * along_J1 / r_J1**3

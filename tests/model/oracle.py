"""The decoder in NumPy and float64, from the equations: explicit P, one sequence at a time.

Shapes: J positions (i query, j key) · D model dim · K heads · R head dim · M MLP dim.
"""

import math

import numpy as np

SLOPES = {"power_of_two": np.array([1 / 2, 1 / 4]), "press": np.array([1 / 16, 1 / 256])}  # K = 2
_erf = np.vectorize(math.erf)
SIGMA = {
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z * (1 + _erf(z / math.sqrt(2))) / 2,
    "relu": lambda z: np.maximum(z, 0),
}


def logits(config, parameters, tokens, segments=None):
    """Return the logits [B, J, V] of tokens [B, J]."""
    rows = range(len(tokens))
    return np.stack(
        [_sequence(config, parameters, tokens[b], segments and segments[b]) for b in rows]
    )


def _sequence(config, parameters, tokens, segments):
    x = parameters["embedding"][tokens]
    for index in range(config.layers):
        layer = layer_of(parameters, index)
        x = mlp(config, layer["mlp"], attention(config, layer["attention"], x, segments))
    head = parameters["embedding" if config.tie_embeddings else "head"]
    return _rms(x, parameters["norm"], config) @ head.T


def layer_of(parameters, index):
    """Return the parameters of one layer, without the layer axis."""
    pick = lambda tree: {k: pick(v) if isinstance(v, dict) else v[index] for k, v in tree.items()}
    return pick(parameters["blocks"])


def attention(config, p, x, segments=None):
    """Return x [J, D] after the attention sublayer with parameters p."""
    if config.attention.kind == "cem":
        force = lambda u, h: _interaction_force(u, h, p, config, segments)
        return _descent(x, force, p, config.attention, config)
    for _ in range(config.attention.steps):
        x = x + _llama_attention(_rms(x, p["norm"], config), p, config, segments)
    return x


def mlp(config, p, x):
    """Return x [J, D] after the MLP sublayer with parameters p."""
    if config.mlp.kind == "cem":
        force = lambda u, h: _elementwise_force(u, h, p, config)
        return _descent(x, force, p, config.mlp, config)
    for _ in range(config.mlp.steps):
        h = _rms(x, p["norm"], config)
        x = x + (SIGMA[config.mlp.activation](h @ p["gate"].T) * (h @ p["up"].T)) @ p["down"]
    return x


def _rms(x, weight, config):
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)


def _descent(x, force, parameters, settings, config):
    """Return x after T steps of Eq. 16–17, with the configured norms and residual stream."""
    h = _rms(x, parameters["norm"], config)
    eta = parameters["eta"] if settings.learn_step_size else settings.step_size
    weight = {
        "shared": parameters["norm"],
        "separate": parameters.get("step_norm"),
        "weightless": np.ones(config.dim),
        "none": np.ones(config.dim),
    }[config.step_norm]
    x = h if config.residual == "normalized" else x
    for _ in range(settings.steps):
        if config.step_norm == "none":
            x = x + eta * force(x, h)
            continue
        moved = force(_rms(x, weight, config), h)
        if config.norm_gradient == "scaled":
            moved = weight * moved
        if config.norm_gradient == "full":
            moved = np.stack([_jacobian(row, weight, config).T @ f for row, f in zip(x, moved)])  # noqa: B905
        x = x + eta * moved
    return x


def _jacobian(x, weight, config):
    """Return ∂RMSNorm(x)/∂x."""
    scale = np.sqrt((x**2).mean() + config.norm_eps)
    return weight[:, None] * (np.eye(len(x)) / scale - np.outer(x, x) / (len(x) * scale**3))


def _matrix(p, settings, dim):
    """Return P, [D, D] or [K, D, D] (Eq. 13)."""
    p_diagonal = np.log1p(np.exp(p["p"] * math.sqrt(dim)))
    matrix = p_diagonal[..., None] * np.eye(dim)
    if settings.preconditioner == "diagonal":
        return matrix
    left, transpose = p["left"], lambda m: np.swapaxes(m, -1, -2)
    if settings.preconditioner_form == "psd":
        return matrix + left @ transpose(left)
    return matrix + left @ transpose(p["right"]) + p["right"] @ transpose(left)


def _interaction_force(u, h, p, config, segments):
    """Return F_i = Σ_k P_k(W^Q_kᵀ o_ik [ + d_k ∘ a_ik ]) (Eq. 14)."""
    c = config.attention
    key = _turned(np.einsum("krd,jd->jkr", p["key"], h), c)
    alpha = _softmax(_products(u, h, p, config), p, config, segments)
    o = _turned(np.einsum("kij,jkr->ikr", alpha, key), c, -1)
    force = np.einsum("krd,ikr->ikd", p["query"], o)
    if c.diagonal_in_update:
        force = force + _diagonal(p, config) * np.einsum("kij,jd->ikd", alpha, h)
    if c.preconditioner == "none":
        return force.sum(1)
    matrix = np.broadcast_to(
        _matrix(p["preconditioner"], c, config.dim), (c.heads, config.dim, config.dim)
    )
    return np.einsum("ked,ikd->ie", matrix, force)


def _diagonal(p, config):
    """Return d_k, [K, D]."""
    zero = np.zeros((config.attention.heads, config.dim))
    return zero if config.attention.diagonal == "none" else zero + p["diagonal"]


def _products(u, h, p, config):
    """Return k_j·q_i + h_j·(d ∘ u_i), [K, J, J]."""
    key = _turned(np.einsum("krd,jd->jkr", p["key"], h), config.attention)
    query = _turned(np.einsum("krd,jd->jkr", p["query"], u), config.attention)
    diagonal = np.einsum("kd,id,jd->kij", _diagonal(p, config), u, h)
    return np.einsum("ikr,jkr->kij", query, key) + diagonal


def _llama_attention(h, p, config, segments):
    c = config.attention
    q = _turned(np.einsum("krd,jd->jkr", p["query"], h), c)
    k = _turned(np.einsum("krd,jd->jkr", p["key"], h), c)
    v = np.einsum("krd,jd->jkr", p["value"], h)
    alpha = _softmax(np.einsum("ikr,jkr->kij", q, k), p, config, segments)
    return np.einsum("krd,kij,jkr->id", p["output"], alpha, v)


def _softmax(products, p, config, segments):
    """Return α [K, J, J], given the products that τ divides."""
    weight = np.exp(_scores(products, p, config, segments))
    return weight / weight.sum(-1, keepdims=True)


def _scores(products, p, config, segments):
    """Return s [K, J, J], −∞ where hidden, given the products that τ divides."""
    c = config.attention
    positions = np.arange(products.shape[-1])
    distance = positions[:, None] - positions[None, :]
    rules = {"sqrt_head_dim": config.dim / c.heads, "sqrt_model_dim": config.dim}
    scores = products / (math.sqrt(rules[c.tau]) if c.tau in rules else float(c.tau))
    if c.position == "alibi":
        scores = scores - SLOPES[c.alibi_slopes][:, None, None] * distance
    if c.self_bias:
        scores = scores + p["self_bias"][:, None, None] * (distance == 0)
    hidden = distance < 0
    if segments is not None:
        hidden = hidden | (np.asarray(segments)[:, None] != np.asarray(segments)[None, :])
    return np.where(hidden, -np.inf, scores)


def _turned(x_JKR, c, direction=1):
    """Return rot(i) x_i, with coordinates r and r + R/2 as a complex number."""
    if c.position != "rope":
        return x_JKR
    half = x_JKR.shape[-1] // 2
    angle = np.arange(len(x_JKR))[:, None] * c.rope_base ** (-np.arange(half) / half)
    turned = (x_JKR[..., :half] + 1j * x_JKR[..., half:]) * np.exp(direction * 1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def _elementwise_force(u, h, p, config):
    """Return F_i = P tiedᵀ(γ_i ∘ σ(tied u_i)) (Eq. 15)."""
    c = config.mlp
    gamma = h @ p["multiplier"].T
    force = (gamma * SIGMA[c.activation](u @ p["tied"].T)) @ p["tied"]
    if c.preconditioner == "none":
        return force
    return force @ _matrix(p["preconditioner"], c, config.dim)

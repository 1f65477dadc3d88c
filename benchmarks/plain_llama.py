"""A minimal Llama training step in plain JAX, in the form that runs fastest on CPU: the baseline.

One file, no options. Projections are einsums with hand-written gradients (the weight's gradient
as `btd,btf->df`), which measured fastest for float32 and bfloat16 alike.

Shapes: b batch · t positions · d model · f features · k heads · r head dim · v vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax

WEIGHTS = {"query": "dd", "key": "dd", "value": "dd", "output": "dd", "gate": "df", "up": "df"}


def init(key, *, dim, layers, mlp, vocab):
    sizes = {"d": dim, "f": mlp}
    keys = iter(jax.random.split(key, 7 * layers + 2))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape, jnp.float32)

    def layer():
        weights = {name: normal(sizes[a], sizes[b]) for name, (a, b) in WEIGHTS.items()}
        ones = {"norm1": jnp.ones(dim), "norm2": jnp.ones(dim)}
        return weights | ones | {"down": normal(mlp, dim)}

    blocks = [layer() for _ in range(layers)]
    return {
        "embedding": normal(vocab, dim),
        "head": normal(dim, vocab),
        "norm": jnp.ones(dim),
        "blocks": blocks,
    }


@jax.custom_vjp
def linear(x, w):
    return jnp.einsum("btd,df->btf", x, w)


def _linear_backward(residuals, y):
    x, w = residuals
    return jnp.einsum("btf,df->btd", y, w), jnp.einsum("btd,btf->df", x, y)


linear.defvjp(lambda x, w: (linear(x, w), (x, w)), _linear_backward)


def norm(x, weight):
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale * weight[None, None]).astype(x.dtype)


def rope(x):
    _, t, _, r = x.shape
    frequency = 10_000.0 ** (-jnp.arange(0, r, 2) / r)
    angle = (jnp.arange(t)[:, None] * frequency[None])[None, :, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attention(x, p, heads):
    b, t, d = x.shape
    split = lambda y: y.reshape(b, t, heads, d // heads)
    q, k, v = (split(linear(x, p[name])) for name in ("query", "key", "value"))
    scores = jnp.einsum("bikr,bjkr->bkij", rope(q), rope(k), preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((t, t), bool))[None, None]
    scores = jnp.where(causal, scores * (d // heads) ** -0.5, -1e30)
    mixed = jnp.einsum("bkij,bjkr->bikr", jax.nn.softmax(scores, -1).astype(x.dtype), v)
    return linear(mixed.reshape(b, t, d), p["output"])


def loss(params, tokens, *, heads, dtype):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"][inputs].astype(dtype)
    cast = lambda p: {k: w if k.startswith("norm") else w.astype(dtype) for k, w in p.items()}
    for block in map(cast, params["blocks"]):
        x = x + attention(norm(x, block["norm1"]), block, heads)
        h = norm(x, block["norm2"])
        gated = jax.nn.silu(linear(h, block["gate"])) * linear(h, block["up"])
        x = x + linear(gated, block["down"])
    x = norm(x, params["norm"])
    logits = linear(x, params["head"].astype(dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_step(*, heads, dtype):
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(0.002, 0.9, 0.95, 1e-9, weight_decay=0.1)
    )
    objective = partial(loss, heads=heads, dtype=dtype)

    def step(state, tokens):
        params, opt_state = state
        value, grads = jax.value_and_grad(objective)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return optimizer.init, step

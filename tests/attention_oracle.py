"""Attention in loops: one query, one head and one key at a time, in NumPy and float64.

And the kernels' functions with their records made of keyword arguments.

Shapes: B leading axes · J positions (i query, j key) · K heads · R head dim · D model dim.
"""

import jax
import numpy as np

from cem_jax import kernels
from cem_jax.kernels import Call, Options, Scores


def call_of(**arrays) -> Call:
    """The record of these arrays, those of the scores by name too."""
    scores = Scores(**{n: arrays.pop(n) for n in Scores._fields if n in arrays})
    return Call(**arrays, scores=scores)


def attend(
    *, implementation="auto", tau, average="none", block_sizes=None, interpret=None, **arrays
):
    """`kernels.attend` of keyword arguments."""
    options = Options(tau, average, implementation, block_sizes, interpret)
    return kernels.attend(call_of(**arrays), options)


def total_log_partition(*, implementation="auto", tau, block_sizes=None, interpret=None, **arrays):
    """`kernels.total_log_partition` of keyword arguments."""
    options = Options(
        tau, implementation=implementation, block_sizes=block_sizes, interpret=interpret
    )
    return kernels.total_log_partition(call_of(**arrays), options)


def compiled_quickly(function, *arguments):
    """`function` compiled without optimisation: compiling takes these tests' time, not running."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(function).lower(*arguments).compile(compiler_options=options)


def random_inputs(
    rng, positions, *, leading=(), heads=2, width=3, dim=4, diagonal="none", slopes=True,
    self_bias=True, segments=False, values=False,
) -> dict:  # fmt: skip
    """Keyword arguments of the kernels. `diagonal`: none | shared | per_head."""
    draw = lambda *shape: rng.normal(size=(*leading, *shape))
    inputs = dict(q=draw(positions, heads, width), k=draw(positions, heads, width))
    if values:
        inputs["v"] = draw(positions, heads, width)
    if diagonal != "none":
        inputs["g"] = draw(positions, *([heads] if diagonal == "per_head" else []), dim)
        inputs["h"] = draw(positions, dim)
    if slopes:
        inputs["slopes"] = rng.uniform(0.05, 0.5, heads)
    if self_bias:
        inputs["self_bias"] = rng.normal(size=heads)
    if segments:  # in any order: a document may come back
        inputs["segments"] = rng.integers(0, 3, (*leading, positions))
    return inputs


def attention(q, k, g=None, h=None, *, tau, v=None, slopes=None, self_bias=None, segments=None):
    """(lse [..., K, J], o [..., J, K, R], a [..., J, K, D] or None)."""
    if q.ndim > 3:
        pick = lambda x, b: None if x is None else x[b]
        parts = [
            attention(
                q[b], k[b], pick(g, b), pick(h, b), tau=tau, v=pick(v, b), slopes=slopes,
                self_bias=self_bias, segments=pick(segments, b),
            )
            for b in range(q.shape[0])
        ]  # fmt: skip
        return tuple(
            None if part[0] is None else np.stack(part) for part in zip(*parts, strict=True)
        )
    positions, heads, _ = q.shape
    values = k if v is None else v
    lse = np.zeros((heads, positions))
    o = np.zeros_like(q)
    a = None if h is None else np.zeros((positions, heads, h.shape[-1]))
    for i in range(positions):
        seen = [j for j in range(i + 1) if segments is None or segments[j] == segments[i]]
        for n in range(heads):
            scores = []
            for j in seen:
                product = q[i, n] @ k[j, n]
                if g is not None:
                    product += (g[i] if g.ndim == 2 else g[i, n]) @ h[j]
                bias = 0.0 if slopes is None else -slopes[n] * (i - j)
                if self_bias is not None and i == j:
                    bias += self_bias[n]
                scores.append(product / tau + bias)
            peak = max(scores)
            lse[n, i] = peak + np.log(np.sum(np.exp(np.array(scores) - peak)))
            weights = np.exp(np.array(scores) - lse[n, i])
            o[i, n] = weights @ values[seen, n]
            if a is not None:
                a[i, n] = weights @ h[seen]
    return lse, o, a

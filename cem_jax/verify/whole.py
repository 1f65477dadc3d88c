"""Checks of a case's whole model: logits, parameter gradients, causality, decoding.

Shapes: B = 1 sequence · J positions · D model dim · V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cem_jax.config import ModelConfig
from cem_jax.model.pure import bind
from cem_jax.verify import plain
from cem_jax.verify.case import Case
from cem_jax.verify.forces import implementations
from cem_jax.verify.rows import (
    Reference,
    Row,
    compare,
    in_dtype,
    jit,
    parameters_in,
    precision,
    reference,
    to_numpy,
)

Run = Callable[[Any, np.ndarray], tuple[np.ndarray, Any]]


def whole_rows(case: Case) -> Iterator[Row]:
    """Check logits and gradients through all steps against the plain model; causality; decoding."""
    c = case.model
    rng = np.random.default_rng(case.seed)
    bar_JV = rng.standard_normal((case.positions, c.vocab_size)).astype(np.float32)
    wanted = reference(
        lambda p, bar: _plain_results(p, bar, case), case.parameters, bar_JV, dtypes=case.dtypes
    )
    for dtype in case.dtypes:
        run = _compiled(c, case, dtype)
        logits, gradients = run(case.parameters, bar_JV)
        yield compare("logits after all T steps", case.shape, dtype, logits, wanted.part(0))
        for name, found, expected in _by_module(gradients, wanted.part(1)):
            check = f"gradient through all T steps, {name}"
            yield compare(check, case.shape, dtype, found, expected)
        if dtype != "bfloat16":
            yield from _causality_rows(case, dtype, run)
            yield _decode_row(case, dtype, wanted.part(0))
    if not case.both_ways:
        return
    other = _other_implementation(case)
    logits, gradients = _compiled(other, case, "float64")(case.parameters, bar_JV)
    names = other.attention.implementation, other.attention.update.replace("_", " ")
    check = f"logits and gradients, {', '.join(names)}"
    yield compare(check, case.shape, "float64", (logits, gradients), wanted)


def _compiled(c: ModelConfig, case: Case, dtype: str) -> Run:
    """Return a function (parameters, cotangent of the logits) -> (logits, gradients)."""
    segments = None if case.segments_J is None else case.segments_J[None]

    @jit
    def run(p, tokens, bar):
        forward = lambda p: bind(c, p)(tokens, segments, dtype=dtype)[0]
        logits, pull_back = jax.vjp(forward, p)
        return logits, pull_back(bar.astype(logits.dtype))[0]

    def call(parameters, bar_JV):
        with precision(dtype):
            p, bar = parameters_in((parameters, bar_JV), dtype)
            return to_numpy(run(p, case.tokens_J[None], bar))

    return call


def _plain_results(p, bar_JV, case: Case) -> tuple[jax.Array, Any]:
    forward = lambda p: plain.logits(p, case.tokens_J, case.segments_J, case.model)
    logits, pull_back = jax.vjp(forward, p)
    return logits, pull_back(bar_JV)[0]


def _by_module(gradients: Any, wanted: Reference) -> Iterator[tuple[str, Any, Reference]]:
    """Yield the gradients of attention, of the MLP, and of everything outside the blocks."""
    blocks = wanted.part("blocks")
    for name in ("attention", "mlp"):
        part = blocks.part(name)
        yield {"attention": "attention", "mlp": "MLP"}[name], gradients["blocks"][name], part
    outside = lambda tree: {name: leaf for name, leaf in tree.items() if name != "blocks"}
    yield "embedding, norm, head", outside(gradients), wanted.map(outside)


def _other_implementation(case: Case) -> ModelConfig:
    """Return the config's model with the other update and another implementation."""
    a, f = case.model.attention, case.model.mlp
    other = {"autodiff": "closed_form", "closed_form": "autodiff"}
    names = [name for name in implementations() if name != a.implementation]
    attention = replace(a, implementation=names[0], update=other[a.update])
    return replace(case.model, attention=attention, mlp=replace(f, update=other[f.update]))


def _causality_rows(case: Case, dtype: str, run: Run) -> Iterator[Row]:
    """Check that logits at i do not depend on embeddings after i or of other documents.

    Every token occurs once, so the gradient of its embedding belongs to one position. It must be
    exactly zero.
    """
    parameters = case.parameters
    if case.model.tie_embeddings:  # the output head would add its own gradient to the embedding
        untied = replace(case.model, tie_embeddings=False)
        parameters = {**parameters, "head": parameters["embedding"]}
        run = _compiled(untied, case, dtype)
    positions = np.arange(case.positions)
    worst = {"future": 0.0, "documents": 0.0}
    rng = np.random.default_rng(case.seed)
    for i in sorted({0, case.positions // 2, case.positions - 2} & set(positions)):
        bar_JV = np.zeros((case.positions, case.model.vocab_size), np.float32)
        bar_JV[i] = rng.standard_normal(case.model.vocab_size)
        _, gradients = run(parameters, bar_JV)
        size_J = np.abs(gradients["embedding"][case.tokens_J]).max(-1)
        share_J = np.nan_to_num(size_J / size_J[i], nan=np.inf)
        worst["future"] = max(worst["future"], share_J[positions > i].max(initial=0.0))
        if case.segments_J is not None:
            other = case.segments_J != case.segments_J[i]
            worst["documents"] = max(worst["documents"], share_J[other].max(initial=0.0))
    yield Row("causality: gradient from the future", case.shape, dtype, worst["future"], 0.0)
    if case.segments_J is not None:
        check = "document mask: gradient across documents"
        yield Row(check, case.shape, dtype, worst["documents"], 0.0)


def _decode_row(case: Case, dtype: str, wanted: Reference) -> Row:
    """Compare decoding, a prefix and then token by token, with the full forward pass."""
    c = case.model
    if case.segments_J is not None:  # decoding handles a single document
        wanted = reference(
            lambda p: plain.logits(p, case.tokens_J, None, c), case.parameters, dtypes=case.dtypes
        )
    prefix = max(1, case.positions // 2)

    @jit
    def decode(p, tokens):
        model = bind(c, p)
        cache = model.cache(1, case.positions, jnp.dtype(dtype))
        first, cache = model.decode(tokens[None, :prefix], cache, jnp.int32(0), dtype=dtype)

        def one(carry, token):
            cache, start = carry
            logits, cache = model.decode(token[None, None], cache, start, dtype=dtype)
            return (cache, start + jnp.int32(1)), logits[0, 0]

        _, rest = jax.lax.scan(one, (cache, jnp.int32(prefix)), tokens[prefix:])
        return jnp.concatenate([first[0], rest])

    with precision(dtype):
        found = decode(parameters_in(case.parameters, dtype), in_dtype(case.tokens_J, dtype))
        return compare("decode over the cache = full forward", case.shape, dtype, found, wanted)

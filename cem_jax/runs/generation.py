"""Continue a prompt, token by token, over a decode cache.

The model reads the separator that documents were trained with, then the prompt. Together they must
fit the context, and generation ends at the latest when the context is full.

Shapes: V vocabulary · K ids kept by top-k · N prompt tokens, padded.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cem_jax.config import Config
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.run import Run


class Sampling(NamedTuple):
    """Rules for choosing the next token. Temperature 0 always takes the likeliest."""

    temperature: float = 1.0
    top_k: int | None = None  # among the k likeliest
    top_p: float | None = None  # among the fewest likeliest whose probabilities reach p
    seed: int = 0


class Generation(NamedTuple):
    text: str  # the continuation, without the prompt
    tokens: int  # generated, not counting a final separator
    prompt_tokens: int
    stop: str  # separator | length (max_tokens) | context


def generate_text(
    run: Run,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """Return the continuation of `prompt` by the checkpoint of `run`."""
    generator = Generator(run.config, run.parameters, run.tokenizer)
    return generator(prompt, max_tokens, Sampling(temperature, top_k, top_p, seed)).text


def prompt_ids(config: Config, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids that the model reads: the separator and the prompt's tokens.

    Raises UserError if they exceed data.context.
    """
    before, after = tokenizer.separator_ids(config.data.separator)
    start = before or after
    ids = start + tokenizer.encode(prompt)
    context = config.data.context
    if len(ids) > context:
        raise UserError(
            f"the prompt has {len(ids) - len(start)} tokens, {len(ids)} with the separator before "
            f"it; the model's context (data.context) is {context}: shorten the prompt"
        )
    return ids


class Generator:
    """Continues prompts with given parameters; compiled once per size of prompt and cache."""

    def __init__(self, config: Config, parameters: pure.Parameters, tokenizer: Tokenizer):
        self._config = config
        self._tokenizer = tokenizer
        self._parameters = parameters
        before, after = tokenizer.separator_ids(config.data.separator)
        self._separators = {*before, *after}
        dtype = jnp.dtype(config.train.compute_dtype)

        def decode(parameters, tokens_N, cache, start):
            model = pure.bind(config.model, parameters)
            logits, cache = model.decode(tokens_N[None], cache, start, dtype=dtype)
            return logits[0, -1], cache

        def prefill(parameters, tokens_N, length):
            model = pure.bind(config.model, parameters)
            cache = model.cache(1, length, dtype)
            # The prompt is followed by padding: no query of the prompt sees it, and each position
            # is overwritten before a later query does.
            return decode(parameters, tokens_N, cache, 0)[1]

        def next_token(parameters, token, cache, position, key, temperature, top_k, top_p):
            logits_V, cache = decode(parameters, token[None], cache, position)
            logits_V = logits_V[: tokenizer.vocab_size]  # the model may have spare rows
            key = jax.random.fold_in(key, position)
            return sample(logits_V, key, temperature, top_k, top_p), cache

        self._prefill = jax.jit(prefill, static_argnames="length")
        self._next_token = jax.jit(
            next_token, static_argnames=("temperature", "top_k", "top_p"), donate_argnums=2
        )

    def __call__(
        self,
        prompt: str,
        max_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - immutable
        write: Callable[[str], None] = lambda text: None,
    ) -> Generation:
        """Generate at most `max_tokens` tokens after `prompt`; pass text to `write` as it comes.

        Raises UserError if the prompt does not fit the context.
        """
        ids = prompt_ids(self._config, self._tokenizer, prompt)
        room = self._config.data.context + 1 - len(ids)  # the last token is never read
        stop = "length" if max_tokens <= room else "context"
        text = TextStream(self._tokenizer, ids)
        written = []
        generated = 0
        for token in self._tokens(ids, min(max_tokens, room), sampling):
            if token in self._separators:
                stop = "separator"
                break
            generated += 1
            written.append(text.push(token))
            write(written[-1])
        written.append(text.flush())
        write(written[-1])
        prompt_tokens = len(self._tokenizer.encode(prompt))
        return Generation("".join(written), generated, prompt_tokens, stop)

    def _tokens(self, ids: list[int], count: int, sampling: Sampling):
        """Yield sampled ids."""
        if not count:
            return
        context = self._config.data.context
        length = min(_power_of_two(len(ids) + count - 1), context)
        padded_N = np.zeros(min(_power_of_two(len(ids) - 1), length), np.int32)
        padded_N[: len(ids) - 1] = ids[:-1]
        cache = self._prefill(self._parameters, padded_N, length)
        token = jnp.asarray(ids[-1], jnp.int32)
        key = pure.seeded(sampling.seed)
        rules = sampling.temperature, sampling.top_k, sampling.top_p
        for position in range(len(ids) - 1, len(ids) - 1 + count):
            token, cache = self._next_token(self._parameters, token, cache, position, key, *rules)
            yield int(token)


def sample(
    logits_V: Float[Array, " V"],
    key: Array,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, ""]:
    """Draw a token id from softmax(logits / temperature), in float32 or better.

    Only the `top_k` likeliest ids count, and of those the fewest that reach probability `top_p`;
    the likeliest always does. Temperature 0: the likeliest.
    """
    logits_V = logits_V.astype(jnp.promote_types(logits_V.dtype, jnp.float32))
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    # Subtract the maximum, so that a temperature near 0 does not give inf - inf.
    logits_V = (logits_V - logits_V.max()) / max(temperature, 1e-30)
    # Each id keeps its own noise, so that only excluding an id can change the draw.
    kept = len(logits_V) if top_k is None else min(top_k, len(logits_V))
    limited = top_p is not None and top_p < 1  # 1 excludes nothing, whatever the sum rounds to
    if kept < len(logits_V) or limited:
        sorted_K, ids_K = jax.lax.top_k(logits_V, kept)
        if limited:
            probability_K = jax.nn.softmax(sorted_K)
            before_K = jnp.cumsum(probability_K) - probability_K
            sorted_K = jnp.where(before_K < top_p, sorted_K, -jnp.inf).at[0].set(sorted_K[0])
        logits_V = jnp.full_like(logits_V, -jnp.inf).at[ids_K].set(sorted_K)
    return jax.random.categorical(key, logits_V).astype(jnp.int32)


class TextStream:
    """Decodes tokens as they come; a character split over tokens waits for its last byte."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._anchor = 0  # decode from here: a piece's text may depend on the one before
        self._shown = len(prompt)  # number of ids whose text was returned

    def push(self, token: int) -> str:
        """Add `token` and return the text that is now certain."""
        self._ids.append(token)
        return self._new_text(final=False)

    def flush(self) -> str:
        """Return the rest, with U+FFFD for bytes that form no character."""
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._anchor : self._shown])
        after = self._tokenizer.decode(self._ids[self._anchor :])
        if after.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            return ""
        if before:
            self._anchor = self._shown
        self._shown = len(self._ids)
        return after[len(before) :]


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()

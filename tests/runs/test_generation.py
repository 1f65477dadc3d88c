"""`cem generate`: same text with the cache, stops with the context, samples by the rules."""

import dataclasses
import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import CONTEXT, tiny_config, tiny_parameters, tiny_tokenizer, write_run

from cem_jax.cli import main
from cem_jax.config import with_steps
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.runs.generation import (
    Generator,
    Sampling,
    TextStream,
    generate_text,
    prompt_ids,
    sample,
)
from cem_jax.runs.run import Run

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def generator(tokenizer):
    config = tiny_config()
    return Generator(config, tiny_parameters(config), tokenizer)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory, tokenizer):
    config = tiny_config()
    workdir = tmp_path_factory.mktemp("generate") / "run"
    return write_run(workdir, config, tokenizer, {4: tiny_parameters(config)})


def prompt_of(tokens, tokenizer):
    """Return a text of exactly `count` tokens: a letter in no piece takes one byte piece each."""
    text = "x" * tokens
    assert len(tokenizer.encode(text)) == tokens
    return text


def recomputed(config, parameters, ids, count):
    """Return greedy ids, each from a forward pass over everything before it."""
    model = pure.bind(config.model, parameters)
    forward = jax.jit(lambda tokens: model(tokens))
    ids = list(ids)
    for _ in range(count):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(jnp.argmax(forward(padded)[0, len(ids) - 1])))
    return ids[-count:]


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        ({}, {}),
        ({}, {"attention": 3, "mlp": 1}),
        ({"position": "rope", "diagonal": "per_head", "diagonal_in_update": True}, {}),
        ({"kind": "llama", "mlp_kind": "gated", "position": "rope", "steps": 1}, {}),
        ({"kind": "llama", "position": "none", "steps": 1}, {"attention": 2}),
    ],
    ids=["full", "steps", "rope", "llama", "reused"],
)
def test_greedy_with_the_cache_equals_recomputing_everything(tokenizer, model, steps):
    if model.get("kind") == "llama":
        model = dict(diagonal="none", self_bias=False, preconditioner="none") | model
    if model.get("mlp_kind") == "gated":
        model = dict(mlp_preconditioner="none", mlp_steps=1) | model
    config = tiny_config(model=model)
    parameters = tiny_parameters(config)
    config = dataclasses.replace(config, model=with_steps(config.model, **steps))
    ids = prompt_ids(config, tokenizer, "abc de")
    count = CONTEXT + 1 - len(ids)
    tokens = Generator(config, parameters, tokenizer)._tokens(ids, count, GREEDY)
    assert list(tokens) == recomputed(config, parameters, ids, count)


# The separator before the prompt takes one position; the last token needs none.
@pytest.mark.parametrize("max_tokens", [0, 1, CONTEXT])
@pytest.mark.parametrize("length", [0, 1, CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_prompt_and_new_tokens_against_the_context(generator, tokenizer, length, max_tokens):
    prompt = prompt_of(length, tokenizer)
    if length + 1 > CONTEXT:
        with pytest.raises(UserError, match=f"{length} tokens, {length + 1} with.* is {CONTEXT}:"):
            generator(prompt, max_tokens, GREEDY)
        return
    result = generator(prompt, max_tokens, GREEDY)
    room = CONTEXT - length
    assert result.prompt_tokens == length
    if result.stop == "separator":
        assert result.tokens < min(max_tokens, room)
    else:
        assert result.tokens == min(max_tokens, room)
        assert result.stop == ("length" if max_tokens <= room else "context")
    if max_tokens == 0:
        assert result.text == ""


def test_it_stops_at_the_separator(tokenizer):
    config = tiny_config()
    parameters = tiny_parameters(config)
    # The head always predicts the separator, since states are never all zero.
    states = pure.bind(config.model, parameters).hidden(jnp.full((1, 1), tokenizer.bos_id))
    parameters["head"] = parameters["head"].at[tokenizer.bos_id].set(100 * states[0, 0])
    result = Generator(config, parameters, tokenizer)("", 9, GREEDY)
    assert (result.text, result.tokens, result.stop) == ("", 0, "separator")


def test_spare_rows_of_the_vocabulary_are_never_drawn(tokenizer):
    config = tiny_config(model={"vocab_size": 400})
    result = Generator(config, tiny_parameters(config), tokenizer)("ab", 10, Sampling(5.0))
    assert result.tokens == 10 or result.stop == "separator"  # decoding a spare id would raise


def test_the_seed_decides(generator):
    one, again, other = (generator("ab", 8, Sampling(seed=seed)).text for seed in (1, 1, 2))
    assert one == again != other


def test_top_k_of_one_and_tiny_p_are_greedy(generator):
    greedy = generator("ab", 8, GREEDY).text
    assert generator("ab", 8, Sampling(top_k=1)).text == greedy
    assert generator("ab", 8, Sampling(top_p=1e-9)).text == greedy
    assert generator("ab", 8, Sampling(temperature=1e-35)).text == greedy


def frequencies(logits, draws=4000, **rules):
    keys = jax.random.split(jax.random.key(0), draws)
    ids = jax.vmap(lambda key: sample(jnp.asarray(logits), key, **rules))(keys)
    return np.bincount(ids, minlength=len(logits)) / draws


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 100}, [0, 1, 2, 3]),
        ({"top_p": 0.6}, [1, 3]),  # 0.5 does not reach it, 0.8 does
        ({"top_p": 0.5}, [1]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.83}, [1, 3]),  # top_p applies after top_k: 0.8 of 0.95
    ],
)
def test_sampling_follows_the_distribution(rules, kept):
    p = np.array([0.05, 0.5, 0.15, 0.3])
    expected = np.where(np.isin(np.arange(4), kept), p, 0)
    found = frequencies(np.log(p).astype(np.float32), temperature=1.0, **rules)
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.03)
    assert not found[expected == 0].any()


@pytest.mark.parametrize(
    "rules", [{"top_p": 1.0}, {"top_k": 500}, {"top_k": 10**6, "top_p": 1.0}, {"top_p": 0.999999}]
)
def test_a_setting_that_excludes_nothing_changes_nothing(rules):
    keys = jax.random.split(jax.random.key(0), 200)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=500), jnp.float32)

    def draw(**rules):
        return jax.vmap(lambda key: sample(logits, key, 1.0, **rules))(keys)

    np.testing.assert_array_equal(draw(**rules), draw())


def test_temperature_sharpens():
    p = np.array([0.1, 0.6, 0.3])
    found = frequencies(np.log(p).astype(np.float32), temperature=0.5)
    np.testing.assert_allclose(found, p**2 / (p**2).sum(), atol=0.03)


def test_bfloat16_logits_are_sampled_in_float32():
    """top_p keeps 90 % of 5,000 equal ids; bfloat16 sums would stop growing at a few hundred."""
    rules = dict(temperature=1.0, top_p=0.9)
    found = frequencies(jnp.zeros(5000, jnp.bfloat16), **rules)
    drawn = np.flatnonzero(found)
    assert len(drawn) > 2000  # 4,000 draws among 4,500
    assert 4400 < drawn.max() <= 4501


def test_characters_split_over_tokens_are_complete(tokenizer):
    text = "ab €Ω 🙂数 \N{REPLACEMENT CHARACTER} end"
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, [tokenizer.bos_id])
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == text
    assert len(pieces) > len([piece for piece in pieces if piece])  # some had to wait
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces[:-5])


def test_text_cut_within_a_character(tokenizer):
    ids = tokenizer.encode("ab€")
    stream = TextStream(tokenizer, [])
    shown = "".join(stream.push(token) for token in ids[:-1]) + stream.flush()
    assert shown.startswith("ab\N{REPLACEMENT CHARACTER}") and "€" not in shown


def test_the_text_matches_the_ids(generator, tokenizer):
    ids = prompt_ids(tiny_config(), tokenizer, "ab")
    tokens = list(generator._tokens(ids, 10, Sampling(seed=3)))
    written = []
    result = generator("ab", 10, Sampling(seed=3), written.append)
    expected = tokenizer.decode([*ids, *tokens[: result.tokens]]).removeprefix("ab")
    assert result.text == "".join(written) == expected


def test_text_streams_to_standard_output(run_directory, capsys):
    flags = ["--prompt", "ab", "--max-tokens", "8", "--temperature", "0"]
    assert main(["generate", "--workdir", str(run_directory), *flags]) == 0
    printed = capsys.readouterr()
    text = generate_text(Run.open(run_directory), "ab", max_tokens=8, temperature=0)
    assert printed.out == text + "\n"
    assert "step 4" in printed.err


def test_json_and_standard_input(run_directory, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\n")))
    command = ["generate", "--workdir", str(run_directory), "--json", "--temperature", "0"]
    assert main([*command, "--max-tokens", "99"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert set(result) == {"text", "tokens", "prompt_tokens", "stop", "step"}
    assert result["stop"] in ("context", "separator")
    run = Run.open(run_directory)
    assert result["text"] == generate_text(run, "ab", max_tokens=99, temperature=0)


def test_a_prompt_too_long_is_refused(run_directory, capsys):
    command = ["generate", "--workdir", str(run_directory)]
    assert main([*command, "--prompt", "x" * 99]) == 2
    assert f"is {CONTEXT}" in capsys.readouterr().err

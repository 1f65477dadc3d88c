"""A run directory of a tiny untrained model, made without training."""

import dataclasses
import functools
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from model_configs import full_config, random_parameters

from cem_jax.config import Config, load_config
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.corpus.tokenizer_training import train_model
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.model import pure
from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.position import Position

ROOT = Path(__file__).parents[1]
CONTEXT = 16


def sentences(count: int, seed: int = 0) -> list[str]:
    """Documents of a made-up language, with some characters of several bytes."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdeimnorstu", k=rng.randint(2, 6))) for _ in range(60)]
    words += ["naïve", "größer", "数学", "🙂"]
    return [" ".join(rng.choices(words, k=rng.randint(5, 30))) + ".\n" for _ in range(count)]


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(train_model(sentences(200), 320))


def tiny_dataset(
    path: Path, tokenizer: Tokenizer, *, seed: int = 0, separator: str = "bos"
) -> Path:
    """A dataset with a train and a validation split."""
    corpus, model = path.with_name(path.name + "-corpus"), path.with_name(path.name + ".model")
    model.parent.mkdir(parents=True, exist_ok=True)
    model.write_bytes(tokenizer.model_bytes)
    for split, count in (("train", 60), ("validation", 25)):
        file = corpus / split / "a.jsonl"
        file.parent.mkdir(parents=True)
        texts = sentences(count, seed=seed + count)
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(corpus)], model, path, separator=separator)
    return path


def tiny_config(dataset: Path | None = None, *, model: dict | None = None, **fields) -> Config:
    """Full CEM at a tiny size; `model` as for `full_config`, `fields` dotted with __ for dots."""
    overrides = {
        "data.path": "" if dataset is None else str(dataset),
        "data.context": CONTEXT,
        "train.steps": 2,
        "train.global_batch": 4,
        "train.compute_dtype": "float32",
    } | {name.replace("__", "."): value for name, value in fields.items()}
    config = load_config(str(ROOT / "configs" / "base.py"), overrides)
    model = {"vocab_size": 320, **(model or {})}
    return dataclasses.replace(config, model=full_config(**model))


def tiny_parameters(config: Config, seed: int = 0) -> pure.Parameters:
    """Drawn by NumPy: compiling the initialisation would take longer than a test."""
    rng = np.random.default_rng(seed)
    shift = lambda leaf: jnp.asarray(leaf + 0.1 * rng.standard_normal(leaf.shape), jnp.float32)
    return jax.tree.map(shift, random_parameters(config.model))


def write_run(
    workdir: Path,
    config: Config,
    tokenizer: Tokenizer,
    steps: dict[int, pure.Parameters],
    /,
    **recorded,
) -> Path:
    """What `cem train` leaves."""
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    (workdir / "tokenizer.model").write_bytes(tokenizer.model_bytes)
    with Writer(workdir / "checkpoints", keep=9, keep_best=False) as checkpoints:
        for step, parameters in steps.items():
            state = {
                "params": parameters,
                "opt_state": {"mu": np.zeros(3, np.float32)},
                "step": np.int32(step),
            }
            position = Position(
                step, tokenizer_hash=tokenizer.hash, separator=config.data.separator
            )
            checkpoints.save(state, dataclasses.replace(position, **recorded))
    return workdir

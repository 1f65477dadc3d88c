"""A configuration and a corpus small enough for any test."""

import random
import sys
import tempfile
from pathlib import Path

from cem_jax.config import Config, load_config
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.corpus.tokenizer_training import train_tokenizer

BASE = str(Path(__file__).parents[1] / "configs" / "base.py")
WORDS = ["gradient", "energy", "step", "layer", "token", "query", "key", "head", "norm", "loss"]
FIELDS = {
    "model.vocab_size": 320,
    "model.dim": 32,
    "model.layers": 2,
    "model.attention.heads": 2,
    "model.mlp.dim": 48,
    "data.context": 32,
    "train.global_batch": 4,
    "train.steps": 8,
    "train.compute_dtype": "float32",
    "checkpoint.every": 3,
    "eval.every": 4,
    "eval.batches": 2,
    "log.every": 1,
    "log.tensorboard": False,
    "log.compile_cache": str(Path(tempfile.gettempdir()) / "cem_jax-tests-compiled"),
}


def tiny_config(**changes) -> Config:
    """base.py made tiny; `model__dim=64` changes model.dim."""
    return load_config(BASE, FIELDS | {name.replace("__", "."): v for name, v in changes.items()})


def tiny_dataset(folder: Path, *, documents: int = 120, seed: int = 0) -> Path:
    """A prepared dataset with train and validation splits, its tokenizer of 320 pieces."""
    rng = random.Random(seed)
    for split, count in (("train", documents), ("validation", max(4, documents // 10))):
        (folder / "corpus" / split).mkdir(parents=True)
        for index in range(count):
            lines = [" ".join(rng.choices(WORDS, k=9)) for _ in range(rng.randint(3, 12))]
            (folder / "corpus" / split / f"{index:04}.txt").write_text("\n".join(lines) + "\n")
    corpus, model = str(folder / "corpus"), folder / "tokenizer.model"
    train_tokenizer([corpus], model, 320, out=sys.stderr)
    prepare([corpus], model, folder / "dataset")
    return folder / "dataset"

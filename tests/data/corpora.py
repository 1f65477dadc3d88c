"""Small corpora written and read back without the code under test."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cem_jax.data.dataset.store import Dataset

MakeDataset = Callable[..., Dataset]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def all_tokens(dataset: Dataset, split: str) -> np.ndarray:
    """Read the split's stream with plain np.load, as anyone could."""
    shards = dataset.splits[split].shards
    return np.concatenate([np.load(dataset.path / shard.file) for shard in shards])


def files_of(root: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def contents_of(root: Path) -> dict[str, bytes]:
    """Return the `files_of` a dataset, without the command that made it."""
    files = files_of(root)
    description = json.loads(files["dataset.json"])
    del description["command"], description["checksum"]
    return files | {"dataset.json": json.dumps(description).encode()}

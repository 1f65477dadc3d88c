"""Checks of a dataset's contents against its description and tokenizer."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from cem_jax.data.dataset.store import (
    Dataset,
    TokenStream,
    open_dataset,
    read_description,
)
from cem_jax.errors import UserError
from cem_jax.storage.durable import sha256_of

_SCAN_LIMIT = 1 << 28  # tokens per split searched at start-up for ids that do not fit
_SCAN_BLOCK = 1 << 22


def check_dataset(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a whole dataset, compare it with its description, and return the description.

    Raises UserError naming every file whose checksum, ids or separators do not match.
    """
    dataset = open_dataset(path)
    separators = dataset.load_tokenizer().separator_ids(dataset.separator)
    problems = []
    description = read_description(dataset.path)
    for name, split in dataset.splits.items():
        for shard in split.shards:
            if f"sha256:{sha256_of(dataset.path / shard.file)}" != shard.checksum:
                problems.append(f"{dataset.path / shard.file} has changed since it was written")
        for part in map(dataset.only, split.sources) if split.sources else (dataset,):
            problems += _content_problems(part, name, *separators)
    if problems:
        raise UserError(*problems)
    return description


def check_token_ids(dataset: Dataset) -> None:
    """Check that every token id fits the dataset's tokenizer.

    Reads the first 2²⁸ tokens of every split (under a second); loaders check what they read, so
    damage beyond that is found too.

    Raises:
      UserError: names the first id of each split that does not fit, and its place.
    """
    problems = []
    limit = dataset.vocab_size
    for name in dataset.splits:
        stream = TokenStream(dataset, name)
        for start, ids in _blocks(stream, min(len(stream), _SCAN_LIMIT)):
            if ids.max() >= limit:
                index = start + int(np.argmax(ids >= limit))
                problems.append(
                    f"{stream.locate(index)} (document {_document_of(dataset, stream, index)}): "
                    f"id {int(stream.read(index, 1)[0])} does not fit a vocabulary of {limit}"
                )
                break
    if problems:
        raise UserError(*problems)


def _content_problems(
    dataset: Dataset, name: str, before: list[int], after: list[int]
) -> Iterator[str]:
    """Yield the faults of one stream: a source's, or a split's where sources have no names."""
    stream = TokenStream(dataset, name)
    counts = dict.fromkeys(before + after, 0)
    for start, ids in _blocks(stream, len(stream)):
        for piece in counts:
            counts[piece] += int(np.count_nonzero(ids == piece))
        if ids.max() >= dataset.vocab_size:
            index = start + int(np.argmax(ids >= dataset.vocab_size))
            yield f"{stream.locate(index)}: an id outside the vocabulary of {dataset.vocab_size}"
            return
    documents = dataset.splits[name].documents
    for piece, count in counts.items():
        if count != documents:
            yield (
                f"{dataset.name}, {name}: {count:,} separators (id {piece}) for "
                f"{documents:,} documents"
            )


def _blocks(stream: TokenStream, tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, tokens, _SCAN_BLOCK):
        yield start, stream.read(start, min(_SCAN_BLOCK, tokens - start))


def _document_of(dataset: Dataset, stream: TokenStream, index: int) -> int:
    """Return the 1-based number of the document that contains a token."""
    before, after = dataset.load_tokenizer().separator_ids(dataset.separator)
    if before:
        counted, first, piece = index + 1, 0, before[0]
    else:
        counted, first, piece = index, 1, after[0]
    return first + sum(int(np.count_nonzero(ids == piece)) for _, ids in _blocks(stream, counted))

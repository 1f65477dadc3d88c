"""Dataset directories: opening, checking, and reading their token streams.

    dataset.json                 what it is: tokenizer, splits, counts, checksums
    tokenizer.model              the SentencePiece model the tokens were made with
    <split>/tokens-00000.npy …   one flat stream of uint16 or uint32 ids, cut anywhere

Windows: with J targets each, window w is the J+1 tokens [wJ, wJ+J] of a split's stream, so every
token but the stream's first is a target once.
"""

import bisect
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Integer

from cem_jax.data.shards import sha256_of, token_dtype
from cem_jax.data.tokenizer import SEPARATORS, Tokenizer
from cem_jax.errors import UserError

FORMAT = 1
DESCRIPTION = "dataset.json"
MODEL = "tokenizer.model"
_SCAN_LIMIT = 1 << 28  # tokens of a split read at start-up in search of ids that do not fit
_SCAN_BLOCK = 1 << 22


@dataclass(frozen=True)
class Shard:
    file: str  # relative to the dataset's directory
    tokens: int
    checksum: str  # sha256 of the whole file


@dataclass(frozen=True)
class Split:
    tokens: int  # separators included
    documents: int
    bytes: int  # UTF-8 bytes of the documents, separators not counted
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Dataset:
    """An opened dataset directory; see `open_dataset`."""

    path: Path
    tokenizer_hash: str
    vocab_size: int  # pieces of the tokenizer
    separator: str  # bos | eos | both
    splits: dict[str, Split]
    fingerprint: str  # of the contents: equal for equal tokens, wherever the directory lies
    dropped: dict[str, int]

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer stored with the tokens; UserError when it is not the one they need."""
        tokenizer = Tokenizer.load(self.path / MODEL)
        self.require_tokenizer(tokenizer.hash, str(self.path / MODEL))
        return tokenizer

    def require_tokenizer(self, other_hash: str, owner: str) -> None:
        """Raise UserError unless `owner` uses the very tokenizer these tokens were made with."""
        if other_hash != self.tokenizer_hash:
            raise UserError(
                f"{self.path} was made with tokenizer {self.tokenizer_hash}, but {owner} has "
                f"{other_hash}: prepare the data with the same tokenizer"
            )

    def split(self, name: str) -> Split:
        """One split by name; UserError naming those there are."""
        if name not in self.splits:
            raise UserError(
                f"{self.path} has no split {name!r}; it has {', '.join(self.splits)} "
                "(`cem prepare` makes one of a folder of that name, or by --validation-fraction)"
            )
        return self.splits[name]


class TokenStream:
    """One split's tokens as a single array over memory-mapped shards."""

    def __init__(self, dataset: Dataset, split: str):
        shards = dataset.split(split).shards
        self.files = [dataset.path / shard.file for shard in shards]
        # Plain array views: np.memmap's own indexing costs microseconds a slice.
        self._arrays = [np.asarray(np.load(file, mmap_mode="r")) for file in self.files]
        self._starts = list(accumulate((len(a) for a in self._arrays), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> Integer[np.ndarray, " count"]:
        """Tokens [start, start+count) in the shards' dtype, read-only where no copy is needed.

        Raises IndexError outside the stream.
        """
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens [{start}, {start + count}) of {len(self)}")
        shard = bisect.bisect_right(self._starts, start, hi=len(self._starts) - 1) - 1
        if count and start + count <= self._starts[shard + 1]:
            offset = start - self._starts[shard]
            return self._arrays[shard][offset : offset + count]
        parts = [np.empty(0, self._arrays[0].dtype)]
        while count:
            offset = start - self._starts[shard]
            part = self._arrays[shard][offset : offset + count]
            parts.append(part)
            start, count, shard = start + len(part), count - len(part), shard + 1
        return np.concatenate(parts)

    def read_into(self, start: int, out: Int32[np.ndarray, " count"]) -> None:
        """Copy tokens [start, start+len(out)) into `out`."""
        out[:] = self.read(start, len(out))

    def locate(self, index: int) -> str:
        """`file, token n` of a token's place in the stream, for messages."""
        shard = bisect.bisect_right(self._starts, index, hi=len(self._starts) - 1) - 1
        return f"{self.files[shard]}, token {index - self._starts[shard]}"


def num_windows(tokens: int, context: int) -> int:
    """Windows of `context` targets in a stream of so many tokens."""
    return max(0, tokens - 1) // context


def open_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Open a directory written by `cem prepare`, after checking each shard's size and dtype.

    Contents are not read here: `cem prepare --check` compares checksums. Raises UserError with
    everything that is wrong.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"dataset {path} does not exist: make one with `cem prepare`")
    description = _read_description(path)
    try:
        dataset = _from_description(path, description)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path / DESCRIPTION} is damaged ({type(error).__name__}: {error}): prepare again"
        ) from None
    dtype = token_dtype(dataset.vocab_size)
    problems = [
        problem
        for split in dataset.splits.values()
        for shard in split.shards
        if (problem := _shard_problem(path / shard.file, shard.tokens, dtype))
    ]
    if not (path / MODEL).is_file():
        problems.append(f"{path / MODEL} is missing")
    if problems:
        raise UserError(*problems)
    return dataset


def check_dataset(path: str | os.PathLike[str]) -> dict:
    """`cem prepare --check`: read everything again and compare; the description if all agrees.

    Raises UserError naming every file whose checksum, ids or separators do not fit.
    """
    dataset = open_dataset(path)
    separators = dataset.load_tokenizer().separator_ids(dataset.separator)
    problems = []
    for name, split in dataset.splits.items():
        for shard in split.shards:
            if sha256_of(dataset.path / shard.file) != shard.checksum:
                problems.append(f"{dataset.path / shard.file} has changed since it was written")
        problems += _content_problems(dataset, name, split, *separators)
    if problems:
        raise UserError(*problems)
    return _read_description(dataset.path)


def check_token_ids(dataset: Dataset, vocab_size: int) -> None:
    """Raise UserError unless every token id, and the tokenizer, fits `vocab_size` pieces.

    Reads the first 2²⁸ tokens of every split (under a second); loaders check what they read
    against the tokenizer's size, so a damaged shard beyond that is found too.
    """
    problems = []
    if dataset.vocab_size > vocab_size:
        problems.append(
            f"{dataset.path}: the tokenizer has {dataset.vocab_size} pieces, more than "
            f"model.vocab_size = {vocab_size}"
        )
    for name in dataset.splits:
        stream = TokenStream(dataset, name)
        limit = min(vocab_size, dataset.vocab_size)
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


def _read_description(path: Path) -> dict:
    try:
        return json.loads((path / DESCRIPTION).read_text())
    except FileNotFoundError:
        hint = "it is an unfinished one" if path.suffix == ".partial" else "not a dataset"
        raise UserError(f"{path} has no {DESCRIPTION}: {hint}; run `cem prepare`") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path / DESCRIPTION} cannot be read: {error}") from None


def _from_description(path: Path, description: dict) -> Dataset:
    if description["format"] != FORMAT:
        raise ValueError(f"format {description['format']!r}, this version reads {FORMAT}")
    tokenizer = description["tokenizer"]
    if tokenizer["separator"] not in SEPARATORS:
        raise ValueError(f"separator {tokenizer['separator']!r}")
    splits = {}
    for name, entry in description["splits"].items():
        shards = tuple(Shard(s["file"], s["tokens"], s["checksum"]) for s in entry["shards"])
        if not shards or sum(shard.tokens for shard in shards) != entry["tokens"]:
            raise ValueError(f"the shards of {name} do not add up to its tokens")
        splits[name] = Split(entry["tokens"], entry["documents"], entry["bytes"], shards)
    contents = [tokenizer, {name: [s.checksum for s in splits[name].shards] for name in splits}]
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    return Dataset(
        path=path,
        tokenizer_hash=tokenizer["hash"],
        vocab_size=int(tokenizer["vocab_size"]),
        separator=tokenizer["separator"],
        splits=splits,
        fingerprint=f"sha256:{digest}",
        dropped=dict(description["dropped"]),
    )


def _shard_problem(file: Path, tokens: int, dtype: np.dtype) -> str | None:
    try:
        array = np.load(file, mmap_mode="r")
    except FileNotFoundError:
        return f"{file} is missing"
    except (OSError, ValueError, EOFError) as error:
        return f"{file} is damaged or cut short: {error}"
    if array.dtype != dtype:
        return f"{file} holds {array.dtype} values instead of {dtype}"
    if array.shape != (tokens,):
        return f"{file} holds {array.shape} values instead of {tokens:,} tokens"
    return None


def _content_problems(
    dataset: Dataset, name: str, split: Split, before: list[int], after: list[int]
) -> Iterator[str]:
    stream = TokenStream(dataset, name)
    counts = dict.fromkeys(before + after, 0)
    for start, ids in _blocks(stream, len(stream)):
        for piece in counts:
            counts[piece] += int(np.count_nonzero(ids == piece))
        if ids.max() >= dataset.vocab_size:
            index = start + int(np.argmax(ids >= dataset.vocab_size))
            yield f"{stream.locate(index)}: an id outside the tokenizer's {dataset.vocab_size}"
            return
    for piece, count in counts.items():
        if count != split.documents:
            yield (
                f"{dataset.path}, {name}: {count:,} separators (id {piece}) for "
                f"{split.documents:,} documents"
            )


def _blocks(stream: TokenStream, tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, tokens, _SCAN_BLOCK):
        yield start, stream.read(start, min(_SCAN_BLOCK, tokens - start))


def _document_of(dataset: Dataset, stream: TokenStream, index: int) -> int:
    """1-based number of the document that a token lies in."""
    before, after = dataset.load_tokenizer().separator_ids(dataset.separator)
    if before:
        counted, first, piece = index + 1, 0, before[0]
    else:
        counted, first, piece = index, 1, after[0]
    return first + sum(int(np.count_nonzero(ids == piece)) for _, ids in _blocks(stream, counted))

"""Dataset directories: opening, checking, and reading their token streams.

    dataset.json                 the description: tokenizer, splits, counts, checksums
    tokenizer.model              the SentencePiece model the tokens were made with
    <split>/tokens-00000.npy …   one flat stream of uint16 or uint32 ids, cut anywhere
    <split>/tokens-NAME-00000.npy …   one such stream per source, where sources have names

A split is the streams of its sources, one after another. Windows: with J targets each, window w is
the J+1 tokens [wJ, wJ+J] of a stream, so every token but the stream's first is a target once.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Integer

from cem_jax.data.dataset.tokenizer import SEPARATORS, Tokenizer
from cem_jax.errors import UserError
from cem_jax.storage.paths import any_path

FORMAT = 1
DESCRIPTION = "dataset.json"
MODEL = "tokenizer.model"


@dataclass(frozen=True)
class Shard:
    file: str  # relative to the dataset's directory
    tokens: int
    checksum: str  # sha256 of the whole file
    source: str = ""  # "": sources have no names


@dataclass(frozen=True)
class Counts:
    tokens: int  # separators included
    documents: int
    bytes: int  # UTF-8 bytes of the documents, separators not counted
    unknown: int = field(default=0, kw_only=True)  # tokens for text that the tokenizer cannot spell

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.tokens + other.tokens,
            self.documents + other.documents,
            self.bytes + other.bytes,
            unknown=self.unknown + other.unknown,
        )


NO_COUNTS = Counts(0, 0, 0)


@dataclass(frozen=True)
class Split(Counts):
    shards: tuple[Shard, ...]
    sources: dict[str, Counts]  # by name; {} where sources have no names

    def only(self, source: str) -> "Split":
        """Return the part of the split that is from one source."""
        shards = tuple(shard for shard in self.shards if shard.source == source)
        counts = self.sources[source]
        return Split(**asdict(counts), shards=shards, sources={})


@dataclass(frozen=True)
class Dataset:
    """An opened dataset directory; see `open_dataset`."""

    path: Path
    tokenizer_hash: str
    vocab_size: int  # pieces of the tokenizer
    separator: str  # bos | eos | both
    splits: dict[str, Split]
    fingerprint: str  # of the contents: equal for equal tokens, wherever the directory is
    dropped: dict[str, int]
    source: str = ""  # set if this is only one source of the directory
    url: str = ""  # `path` is a copy of what is there

    @property
    def name(self) -> str:
        """The directory or URL, with #source if this is only one source."""
        place = self.url or str(self.path)
        return f"{place}#{self.source}" if self.source else place

    @property
    def source_names(self) -> tuple[str, ...]:
        """The named sources of all splits."""
        return tuple(sorted({name for split in self.splits.values() for name in split.sources}))

    def only(self, source: str) -> "Dataset":
        """Return one of its named sources; raise UserError if there is no such source."""
        if source not in self.source_names:
            there = ", ".join(self.source_names) or "none (`cem prepare --source-field` makes them)"
            raise UserError(f"{self.path} has no source {source!r}; it has {there}")
        splits = {name: s.only(source) for name, s in self.splits.items() if source in s.sources}
        fingerprint = f"{self.fingerprint}#{source}"
        return replace(self, splits=splits, fingerprint=fingerprint, source=source)

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer stored with the tokens; raise UserError if it is not theirs."""
        tokenizer = Tokenizer.load(self.path / MODEL)
        self.require_tokenizer(tokenizer.hash, str(self.path / MODEL))
        return tokenizer

    def require_tokenizer(self, other_hash: str, owner: str) -> None:
        """Raise UserError unless `owner` uses the tokenizer that these tokens were made with."""
        if other_hash != self.tokenizer_hash:
            raise UserError(
                f"{self.path} was made with tokenizer {self.tokenizer_hash}, but {owner} has "
                f"{other_hash}: prepare the data with the same tokenizer"
            )

    def split(self, name: str) -> Split:
        """Return one split; raise UserError if there is no such split."""
        if name not in self.splits:
            raise UserError(
                f"{self.name} has no split {name!r}; it has {', '.join(self.splits)} "
                "(`cem prepare` makes one from a folder of that name, or by --validation-fraction)"
            )
        return self.splits[name]


class TokenStream:
    """One split's tokens as a single array over memory-mapped shards."""

    def __init__(self, dataset: Dataset, split: str):
        shards = dataset.split(split).shards
        self.files = [dataset.path / shard.file for shard in shards]
        # Plain array views: np.memmap's own indexing costs microseconds per slice.
        self._arrays = [np.asarray(np.load(file, mmap_mode="r")) for file in self.files]
        self._starts = np.cumsum([0, *map(len, self._arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _shard_of(self, index: int) -> int:
        return min(int(np.searchsorted(self._starts, index, side="right")), len(self._arrays)) - 1

    def read(self, start: int, count: int) -> Integer[np.ndarray, " count"]:
        """Return tokens [start, start+count) in the shards' dtype; read-only if not copied.

        Raises IndexError outside the stream.
        """
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens [{start}, {start + count}) of {len(self)}")
        shard = self._shard_of(start)
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

    def gather(self, start_R: Int64[np.ndarray, " R"], length: int) -> Int32[np.ndarray, "R T"]:
        """Return `length` tokens from each start on; raise IndexError outside the stream."""
        if len(start_R) and not 0 <= start_R.min() <= start_R.max() <= len(self) - length:
            raise IndexError(f"{length} tokens from one of {start_R} on, of {len(self)}")
        shard_R = np.searchsorted(self._starts, start_R, side="right") - 1
        is_whole_R = start_R + length <= self._starts[shard_R + 1]
        ids_RT = np.empty((len(start_R), length), self._arrays[0].dtype)
        for shard in sorted(set(shard_R[is_whole_R].tolist())):
            # All windows of the shard as overlapping rows, so that one call picks many.
            ids = self._arrays[shard]
            shape, step = (len(ids) - length + 1, length), ids.itemsize
            window_WT = np.ndarray(shape, ids.dtype, ids, strides=(step, step))
            row_N = np.flatnonzero(is_whole_R & (shard_R == shard))
            ids_RT[row_N] = window_WT[start_R[row_N] - self._starts[shard]]
        for row in np.flatnonzero(~is_whole_R):
            ids_RT[row] = self.read(int(start_R[row]), length)
        return ids_RT.astype(np.int32)

    def locate(self, index: int) -> str:
        """Return a token's place as `file, token n`, for messages."""
        shard = self._shard_of(index)
        return f"{self.files[shard]}, token {index - self._starts[shard]}"


def token_dtype(vocab_size: int) -> np.dtype:
    """Return little-endian uint16 if every id fits, or uint32 beyond 65,536 pieces."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def num_windows(tokens: int, context: int) -> int:
    """Return the number of windows of `context` targets in a stream of `tokens` tokens."""
    return max(0, tokens - 1) // context


def open_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Open a directory written by `cem prepare`, after checking each shard's size and dtype.

    Contents are not read here: `cem prepare --check` compares checksums. Raises UserError with
    everything that is wrong.
    """
    path = any_path(path)
    if not path.is_dir():
        raise UserError(f"dataset {path} does not exist: make one with `cem prepare`")
    description = read_description(path)
    try:
        dataset = _from_description(path, description)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path / DESCRIPTION} is damaged ({type(error).__name__}: {error}): prepare again"
        ) from None
    written = description.get("checksum")
    if written is not None and written != description_checksum(description):
        raise UserError(f"{path / DESCRIPTION} has changed since it was written: prepare again")
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


def read_description(path: Path) -> dict[str, Any]:
    """Read dataset.json; raise UserError if that is not possible."""
    try:
        return json.loads((path / DESCRIPTION).read_text())
    except FileNotFoundError:
        hint = "it is unfinished" if path.suffix == ".partial" else "it is not a dataset"
        raise UserError(f"{path} has no {DESCRIPTION}: {hint}; run `cem prepare`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path / DESCRIPTION} cannot be read: {error}") from None


def description_bytes(description: dict[str, Any]) -> bytes:
    """Return the content of dataset.json, with a checksum of itself."""
    whole = description | {"checksum": description_checksum(description)}
    return (json.dumps(whole, indent=1) + "\n").encode()


def description_checksum(description: dict[str, Any]) -> str:
    """Return the checksum of a description without its checksum entry."""
    rest = {key: value for key, value in description.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()}"


def _from_description(path: Path, description: dict) -> Dataset:
    if description["format"] != FORMAT:
        raise ValueError(f"format {description['format']!r}, this version reads {FORMAT}")
    tokenizer = description["tokenizer"]
    if tokenizer["separator"] not in SEPARATORS:
        raise ValueError(f"separator {tokenizer['separator']!r}")
    splits = {name: _split_from(name, entry) for name, entry in description["splits"].items()}
    if not splits:
        raise ValueError("it has no split")
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


def inside(file: str) -> str:
    """Return `file` if it is a path inside a dataset's directory; else raise ValueError."""
    place = PurePosixPath(file)
    if place.is_absolute() or ".." in place.parts:
        raise ValueError(f"file {file!r}")
    return file


def _split_from(name: str, entry: dict[str, Any]) -> Split:
    shards = tuple(
        Shard(inside(s["file"]), s["tokens"], s["checksum"], s.get("source", ""))
        for s in entry["shards"]
    )
    whole = _counts(entry)
    named = any(shard.source for shard in shards)
    sources = {source: _counts(of) for source, of in entry["sources"].items() if named}
    parts = sources or {"": whole}
    tokens = {
        source: sum(shard.tokens for shard in shards if shard.source == source) for source in parts
    }
    if (
        not shards
        or tokens != {source: part.tokens for source, part in parts.items()}
        or sum(tokens.values()) != whole.tokens
    ):
        raise ValueError(f"the shards of {name} do not add up to its tokens")
    return Split(**asdict(whole), shards=shards, sources=sources)


def _counts(entry: dict[str, Any]) -> Counts:
    unknown = entry.get("unknown", 0)  # earlier versions did not count them
    return Counts(entry["tokens"], entry["documents"], entry["bytes"], unknown=unknown)


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

"""Encode batches of records as token ids, in one process or several, always in order."""

import collections
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from cem_jax.data.corpus.large_json import BadRecord
from cem_jax.data.corpus.limits import LIMITS, Limits
from cem_jax.data.corpus.readers import UNKNOWN_SOURCE, Fields, Record, read_document
from cem_jax.data.corpus.shards import Stream
from cem_jax.data.dataset.store import Counts, token_dtype
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import RunFailed

_IN_FLIGHT = 3  # batches per worker read ahead,
_IN_FLIGHT_BYTES = 64 << 20  # up to this size in total
_ALONE_BYTES = 32 << 20  # larger batches (one huge document) are encoded here: sending copies them
_TOGETHER_CHARS = 1 << 20  # encoded in one call
_HASH_BITS = 64


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one file."""

    file: int  # its index
    split: str | None  # None: train or validation by the document's hash
    records: list[Record]
    is_last: bool = False  # of its file
    fault: str | None = None  # why the file could not be read further

    def size(self) -> int:
        """Return the approximate number of bytes held."""
        return sum(record.size() for record in self.records)


class Part(NamedTuple):
    """The tokens that a batch adds to one stream."""

    ids: Integer[np.ndarray, " tokens"]
    counts: Counts


@dataclass
class Encoded:
    """The result of encoding a batch."""

    batch: Batch  # without its records
    records: int
    parts: dict[Stream, Part] = field(default_factory=dict)
    dropped: list[tuple[int, str]] = field(default_factory=list)  # (line, reason)
    repaired: list[tuple[int, str]] = field(default_factory=list)  # (line, what was mended)
    without_source: int = 0


@dataclass(frozen=True)
class Encoder:
    """The tokenizer and settings to encode a Batch with; sent to each worker once."""

    tokenizer: Tokenizer
    separator: str
    fields: Fields
    validation_fraction: float
    limits: Limits = LIMITS

    def encode(self, batch: Batch) -> Encoded:
        """Encode a batch, each document between its separators, grouped by stream."""
        result = Encoded(replace(batch, records=[]), len(batch.records))
        pending = _PendingTexts(self.tokenizer)
        documents: dict[Stream, list[_Document]] = {}
        for record in batch.records:
            try:
                document = self._read(record, batch.split, pending, result)
            except BadRecord as bad:
                result.dropped.append((record.line, str(bad)))
            else:
                documents.setdefault(document.stream, []).append(document)
        pending.encode()
        ends = self.tokenizer.separator_ids(self.separator)
        before, after = (np.asarray(ids, pending.dtype) for ids in ends)
        for stream, own in documents.items():
            ids = np.concatenate([part for d in own for part in (before, *d.ids, after)])
            size = sum(document.bytes for document in own)
            unknown = int(np.count_nonzero(ids == self.tokenizer.unknown_id))
            counts = Counts(ids.size, len(own), size, unknown=unknown)
            result.parts[stream] = Part(ids, counts)
        return result

    def _read(
        self, record: Record, split: str | None, pending: "_PendingTexts", result: Encoded
    ) -> "_Document":
        source, pieces = read_document(record, self.fields, self.limits)
        digest = hashlib.blake2b(digest_size=_HASH_BITS // 8)
        size, mended = 0, False

        def texts() -> Iterator[str]:
            nonlocal size, mended
            for piece in pieces:
                digest.update(piece.utf8)
                size += len(piece.utf8)
                mended |= piece.mended
                yield piece.text

        ids: list[np.ndarray] = []
        for part in self.tokenizer.parts(texts()):
            pending.add(part, ids)
        if mended:
            result.repaired.append((record.line, "lone_surrogate"))
        name = ""
        if self.fields.source:
            name = source or UNKNOWN_SOURCE
            result.without_source += source is None
        return _Document(Stream(split or self._split_of(digest.digest()), name), ids, size)

    def _split_of(self, digest: bytes) -> str:
        """Return train or validation by the document's hash: stable, and equal for duplicates."""
        share = int.from_bytes(digest) / (1 << _HASH_BITS)
        return "validation" if share < self.validation_fraction else "train"


class _Document(NamedTuple):
    stream: Stream
    ids: list[np.ndarray]  # one array per part, once encoded
    bytes: int


class _PendingTexts:
    """Parts of documents waiting to be encoded in one call."""

    def __init__(self, tokenizer: Tokenizer):
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._owners: list[list[np.ndarray]] = []
        self._chars = 0

    def add(self, text: str, owner: list[np.ndarray]) -> None:
        """Queue `text`; its ids are appended to `owner`, at the latest by `encode`."""
        self._texts.append(text)
        self._owners.append(owner)
        self._chars += len(text)
        if self._chars >= _TOGETHER_CHARS:
            self.encode()

    def encode(self) -> None:
        """Encode all queued texts."""
        encoded = self._tokenizer.encode_batch(self._texts)
        for ids, owner in zip(encoded, self._owners, strict=True):
            owner.append(np.asarray(ids, self.dtype))
        self._texts, self._owners, self._chars = [], [], 0


def encode_all(batches: Iterator[Batch], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Encode batches in order, in `workers` other processes if more than 1.

    Holds a few megabytes of text per worker, or one larger document, so memory does not grow with
    the corpus.
    """
    if workers == 1:
        yield from map(encoder.encode, batches)
        return
    pool = ProcessPoolExecutor(
        workers,
        # Spawned: a fork may copy locks that JAX's or Arrow's threads hold.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(encoder,),
    )
    pending: collections.deque[tuple[Future[Encoded], int]] = collections.deque()
    held = 0
    try:
        for batch in batches:
            size = batch.size()
            alone = size >= _ALONE_BYTES
            while pending and (
                alone or len(pending) >= _IN_FLIGHT * workers or held + size > _IN_FLIGHT_BYTES
            ):
                future, done = pending.popleft()
                held -= done
                yield _result_of(future)
            if alone:
                yield encoder.encode(batch)
            else:
                pending.append((pool.submit(_encode, batch), size))
                held += size
        for future, _ in pending:
            yield _result_of(future)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result_of(future: Future[Encoded]) -> Encoded:
    try:
        return future.result()
    except BrokenProcessPool:
        raise RunFailed(
            "a worker process was killed, perhaps for lack of memory; rerun the command to "
            "continue; fewer --workers need less"
        ) from None


_encoder: Encoder  # in a worker process


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends the workers
    threading.Thread(target=_follow_parent, daemon=True).start()


def _encode(batch: Batch) -> Encoded:
    return _encoder.encode(batch)


def _follow_parent() -> None:
    """Exit with the parent, even if it was killed: the pool alone would wait forever."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)

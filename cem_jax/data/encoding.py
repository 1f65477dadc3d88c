"""Batches of records to token ids, in this process or in several, always in the same order."""

import collections
import hashlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Integer

from cem_jax.data.readers import BadRecord, Record, document_text
from cem_jax.data.shards import token_dtype
from cem_jax.data.tokenizer import Tokenizer

_IN_FLIGHT = 3  # batches a worker that are read ahead
_HASH_BITS = 64


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one file."""

    file: int  # index of the file
    split: str | None  # None: train or validation by the document's hash
    records: list[Record]


@dataclass
class Part:
    """What a batch adds to one split."""

    ids: Integer[np.ndarray, " tokens"]
    documents: int
    bytes: int  # UTF-8 bytes of the documents


@dataclass
class Encoded:
    file: int
    parts: dict[str, Part] = field(default_factory=dict)
    dropped: list[tuple[int, str]] = field(default_factory=list)  # (line, reason)
    repaired: list[tuple[int, str]] = field(default_factory=list)  # (line, what was mended)


@dataclass(frozen=True)
class Encoder:
    """Everything that turns a Batch into an Encoded; picklable, so that workers can be spawned."""

    model_bytes: bytes
    separator: str
    column: str
    validation_fraction: float

    def start(self) -> None:
        """Load the tokenizer into this process."""
        global _encoder, _tokenizer
        _encoder, _tokenizer = self, Tokenizer.from_bytes(self.model_bytes)

    def split_of(self, encoded: bytes) -> str:
        """Train or validation, by the document's hash alone: the same for ever, twins together."""
        digest = hashlib.blake2b(encoded, digest_size=_HASH_BITS // 8).digest()
        share = int.from_bytes(digest) / (1 << _HASH_BITS)
        return "validation" if share < self.validation_fraction else "train"


_encoder: Encoder
_tokenizer: Tokenizer


def encode_all(batches: Iterator[Batch], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Encode batches in their order, with `workers` processes beside this one if more than 1.

    At most a few batches a worker are held, so that memory does not grow with the corpus.
    """
    if workers == 1:
        encoder.start()
        yield from map(encode_batch, batches)
        return
    pool = ProcessPoolExecutor(
        workers,
        # Spawned: a fork may copy locks that JAX's or Arrow's threads hold.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(encoder,),
    )
    try:
        pending = collections.deque()
        for batch in batches:
            pending.append(pool.submit(encode_batch, batch))
            if len(pending) >= _IN_FLIGHT * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_batch(batch: Batch) -> Encoded:
    """Token ids of a batch by split, each document between its separators."""
    texts: dict[str, list[str]] = {}
    sizes: collections.Counter[str] = collections.Counter()
    result = Encoded(batch.file)
    for record in batch.records:
        try:
            text, encoded, repaired = document_text(record, _encoder.column)
        except BadRecord as bad:
            result.dropped.append((record.line, str(bad)))
            continue
        if repaired:
            result.repaired.append((record.line, repaired))
        split = batch.split or _encoder.split_of(encoded)
        texts.setdefault(split, []).append(text)
        sizes[split] += len(encoded)
    before, after = _tokenizer.separator_ids(_encoder.separator)
    dtype = token_dtype(_tokenizer.vocab_size)
    for split, documents in texts.items():
        pieces = _tokenizer.encode_batch(documents)
        count = sum(map(len, pieces)) + len(pieces) * len(before + after)
        stream = itertools.chain.from_iterable(
            part for ids in pieces for part in (before, ids, after)
        )
        ids = np.fromiter(stream, dtype, count)
        result.parts[split] = Part(ids, len(documents), sizes[split])
    return result


def _start_worker(encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends the workers
    threading.Thread(target=_follow_parent, daemon=True).start()
    encoder.start()


def _follow_parent() -> None:
    """End with the parent, even one killed outright: the pool alone would wait for ever."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)

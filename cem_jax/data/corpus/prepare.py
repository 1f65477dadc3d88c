"""Prepare a dataset: a corpus and a tokenizer in, a dataset directory (see store.py) out."""

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cem_jax.data.corpus.compression import BadFile
from cem_jax.data.corpus.encoding import Batch, Encoder, encode_all
from cem_jax.data.corpus.files import FoundFiles, find_files
from cem_jax.data.corpus.progress import PrepareProgress
from cem_jax.data.corpus.readers import Fields, Record, check_start, read_records
from cem_jax.data.corpus.rerun import INPUT_FILES, require_made_by, was_made
from cem_jax.data.corpus.shards import SHARD_TOKENS, Stream, StreamWriters
from cem_jax.data.corpus.tally import Accounts, Counts
from cem_jax.data.corpus.workspace import Workplace, require_free, workplace
from cem_jax.data.dataset.store import DESCRIPTION, FORMAT, MODEL, description_bytes, token_dtype
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError
from cem_jax.storage.durable import write_durably

VALIDATION_FRACTION = 0.01
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 4096
_SMALL_CORPUS = 8 << 20  # bytes as stored below which starting workers costs more than it saves
_KEEP_SECONDS = 5.0  # between the points that a killed run goes on from
_SPLIT_ORDER = ("train", "validation", "test")


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    tokenizer: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    column: str = "text",
    source_field: str | None = None,
    separator: str = "bos",
    workers: int = 1,
    skip_bad_files: bool = False,
    validation_fraction: float = VALIDATION_FRACTION,
    shard_tokens: int = SHARD_TOKENS,
) -> dict[str, Any]:
    """Write `output`: train, validation and test streams of token ids, and what was dropped.

    Splits are named by folders (see `find_files`). Where no folder names a validation split,
    a document of the rest goes there if its hash falls below `validation_fraction`. With a
    `source_field` the documents of each of its values are a stream of their own. Bad records are
    skipped and counted by reason; a bad file raises UserError, or is reported and left at its
    fault with `skip_bad_files`.

    The bytes are the same for every number of workers. A killed call is continued by the same
    call, to the same bytes; where it is complete, nothing is done, and the result is the same but
    for places in the corpus, which are None where there were any. Raises UserError, leaving
    nothing behind but what can be continued, also when no document is usable, and for an `output`
    that anything else made.
    """
    output = Path(output)
    found, loaded = _check_inputs(inputs, tokenizer, output, separator, skip_bad_files)
    by_hash = not any(file.split == "validation" for file in found.files)
    fields = Fields(column, source_field)
    encoder = Encoder(
        loaded.model_bytes, separator, fields, validation_fraction if by_hash else 0.0
    )
    if sum(file.size for file in found.files) < _SMALL_CORPUS:
        workers = 1
    command = {
        "tokenizer": loaded.hash,
        "--separator": separator,
        "--text-column": column,
        "--source-field": source_field,
        "--validation-fraction": validation_fraction,
        "tokens in a shard": shard_tokens,
        INPUT_FILES: _identity(found),
    }
    if was_made(output):
        description = require_made_by(output, command, skip_bad_files)
        return totals(description) | _places_unknown(description) | {"output": str(output)}
    accounts = Accounts(found.files, fields, skip_bad_files)
    with workplace(output, command) as work:
        try:
            shards = _write_streams(work, accounts, encoder, workers, shard_tokens)
        except BaseException:
            if work.is_resumable():
                _note(f"{work.path} keeps what was done; the same command goes on")
            raise
        description = _describe(accounts, loaded, encoder, shards) | {"command": command}
        (work.path / MODEL).write_bytes(loaded.model_bytes)
        write_durably(work.path / DESCRIPTION, description_bytes(description))
    for warning in _missing_splits(description, found, by_hash and validation_fraction):
        print(f"cem: warning: {warning}", file=sys.stderr)
    return totals(description) | accounts.report(found.ignored) | {"output": str(output)}


def _missing_splits(
    description: dict[str, Any], found: FoundFiles, fraction: float
) -> Iterator[str]:
    """Why there is no training or validation split, where there is none.

    `fraction`: of the documents that went to validation by their hash, 0 where none could.
    """
    named = next((file for file in found.files if file.split), None)
    if "train" not in description["splits"]:
        why = (
            f"{named.path} lies in a folder that stands for {named.split}"
            if named
            else f"all documents went to the validation split ({fraction:.2%} by hash)"
        )
        yield f"there is no training split: {why}"
    if not fraction or "validation" in description["splits"]:
        return
    if all(file.split for file in found.files):
        yield (
            "no validation split: every file lies in a folder that names its split, as "
            f"{named.path}, and only others are split by hash ({fraction:.2%}); "
            "make a folder named validation"
        )
    else:
        yield (
            f"no document fell into the validation split ({fraction:.2%} by hash): a corpus this "
            "small needs a larger --validation-fraction, or a folder named validation"
        )


def _check_inputs(
    inputs: Sequence[str | os.PathLike[str]],
    tokenizer: str | os.PathLike[str],
    output: Path,
    separator: str,
    skip_bad_files: bool,
) -> tuple[FoundFiles, Tokenizer]:
    """Everything that can be found wrong before any work, in one UserError."""
    problems: list[str] = []
    found, loaded = FoundFiles((), ()), None
    try:
        found = find_files(inputs)
    except UserError as error:
        problems += error.messages
    try:
        loaded = Tokenizer.load(tokenizer)
        loaded.separator_ids(separator)
    except UserError as error:
        problems += error.messages
    try:
        if not was_made(output):
            require_free(output)
    except UserError as error:
        problems += error.messages
    for file in () if skip_bad_files else found.files:
        try:
            check_start(file.path)
        except BadFile as bad:
            problems.append(f"{file.path}: {bad} (--skip-bad-files goes on without it)")
    if problems:
        raise UserError(*problems)
    return found, loaded


def _identity(found: FoundFiles) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in found.files:
        path = os.path.abspath(file.path) if isinstance(file.path, Path) else file.path
        digest.update(f"{path}\0{file.size}\0{file.version()}\0{file.split}\n".encode())
    size = sum(file.size for file in found.files)
    return f"{len(found.files):,} files of {size:,} bytes ({digest.hexdigest()})"


def _write_streams(
    work: Workplace, accounts: Accounts, encoder: Encoder, workers: int, shard_tokens: int
) -> dict[Stream, list[dict[str, Any]]]:
    """Encode the corpus from where `work` stands; the finished shards of each stream."""
    dtype = token_dtype(Tokenizer.from_bytes(encoder.model_bytes).vocab_size)
    writers = StreamWriters(work.path, dtype, shard_tokens)
    progress = PrepareProgress([file.size for file in accounts.files], sys.stderr)
    try:
        if work.state:
            _go_on(work, accounts, writers)
        progress.start(accounts.file, accounts.tokens)
        kept = time.monotonic()
        for encoded in encode_all(_batches(accounts, progress), encoder, workers):
            accounts.add(encoded)
            for stream, part in encoded.parts.items():
                writers.append(stream, part.ids)
            progress.made(accounts.documents, accounts.tokens)
            if time.monotonic() - kept >= _KEEP_SECONDS:
                work.keep({"shards": writers.sync(), "accounts": accounts.state()})
                kept = time.monotonic()
        accounts.require_documents()
        return writers.close()
    finally:
        progress.finish()
        writers.abandon()


def _go_on(work: Workplace, accounts: Accounts, writers: StreamWriters) -> None:
    """Put writers and accounts where an earlier process left them."""
    try:
        writers.restore(work.state["shards"])
    except OSError as error:
        writers.abandon()
        work.start_over()
        _note(f"{error}: starting over")
        return
    accounts.restore(work.state["accounts"])
    _note(f"going on behind {accounts.documents:,} documents, done by an earlier run")


def _batches(accounts: Accounts, progress: PrepareProgress) -> Iterator[Batch]:
    """Records of every file from where the accounts stand; the last batch of a file says so."""
    skipped = accounts.records
    for index in range(accounts.file, len(accounts.files)):
        file = accounts.files[index]
        records: list[Record] = []
        size, fault = 0, None
        try:
            on_position = lambda position, index=index: progress.read(index, position)
            for number, record in enumerate(read_records(file.path, accounts.fields, on_position)):
                if number < skipped:
                    continue
                full = len(records) >= _BATCH_RECORDS or size + record.size() > _BATCH_BYTES
                if records and full:
                    yield Batch(index, file.split, records)
                    records, size = [], 0
                records.append(record)
                size += record.size()
        except BadFile as bad:
            fault = str(bad)
        yield Batch(index, file.split, records, is_last=True, fault=fault)
        skipped = 0


def _describe(
    accounts: Accounts,
    tokenizer: Tokenizer,
    encoder: Encoder,
    shards: dict[Stream, list[dict[str, Any]]],
) -> dict[str, Any]:
    """The content of dataset.json."""
    splits = {}
    for split in _SPLIT_ORDER:
        streams = sorted(stream for stream in accounts.streams if stream.split == split)
        if not streams:
            continue
        total = Counts()
        for counts in (accounts.streams[stream] for stream in streams):
            total.tokens += counts.tokens
            total.documents += counts.documents
            total.bytes += counts.bytes
        named = lambda stream: {"source": stream.source} if stream.source else {}
        splits[split] = {
            **vars(total),
            "sources": {s.source or "all": dict(vars(accounts.streams[s])) for s in streams},
            "shards": [shard | named(stream) for stream in streams for shard in shards[stream]],
        }
    return {
        "format": FORMAT,
        "tokenizer": {
            "hash": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
            "separator": encoder.separator,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        },
        "text_column": encoder.fields.text,
        "source_field": encoder.fields.source,
        "validation_fraction": encoder.validation_fraction,
        "splits": splits,
        "dropped": dict(sorted(accounts.dropped.items())),
        "repaired": dict(sorted(accounts.repaired.items())),
        "bad_files": len(accounts.bad_files),
    }


def totals(description: dict[str, Any]) -> dict[str, Any]:
    """Return counts over all splits of a dataset.json, and some of its own entries."""
    splits = description["splits"].values()
    totals = {key: sum(s[key] for s in splits) for key in ("documents", "tokens", "bytes")}
    return totals | {
        key: description[key] for key in ("dropped", "repaired", "splits", "tokenizer")
    }


def _places_unknown(description: dict[str, Any]) -> dict[str, Any]:
    """What `Accounts.report` returns, as far as a finished dataset knows it."""
    has_cases = description["dropped"] or description["repaired"]
    return {
        "cases": None if has_cases else [],
        "bad_files": None if description["bad_files"] else [],
    }


def _note(text: str) -> None:
    print(f"cem: note: {text}", file=sys.stderr)

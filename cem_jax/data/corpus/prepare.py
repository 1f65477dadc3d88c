"""Prepare a dataset: turn a corpus and a tokenizer into a dataset directory (see store.py)."""

import functools
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cem_jax.data.corpus.compression import BadFile
from cem_jax.data.corpus.encoding import Batch, Encoder, encode_all
from cem_jax.data.corpus.files import FoundFiles, find_files
from cem_jax.data.corpus.limits import LIMITS, Limits
from cem_jax.data.corpus.progress import PrepareProgress
from cem_jax.data.corpus.readers import Fields, Record, check_start, read_records
from cem_jax.data.corpus.shards import SHARD_TOKENS, Stream, StreamWriters
from cem_jax.data.corpus.tally import Tally
from cem_jax.data.corpus.workspace import (
    INPUT_FILES,
    Workspace,
    require_free,
    require_made_by,
    was_made,
    workspace,
)
from cem_jax.data.dataset.store import (
    DESCRIPTION,
    FORMAT,
    MODEL,
    NO_COUNTS,
    description_bytes,
    token_dtype,
)
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError, collecting
from cem_jax.storage.durable import write_durably
from cem_jax.storage.paths import any_path

VALIDATION_FRACTION = 0.01
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
    limits: Limits = LIMITS,
) -> dict[str, Any]:
    """Write the dataset `output`; return its counts and what was dropped from the corpus.

    Folders name the splits (see `find_files`). If no folder names a validation split, a document
    of a file without a split goes there when its hash falls below `validation_fraction`. With a
    `source_field`, the documents of each of its values form a stream of their own. Bad records are
    skipped and counted by reason; with `skip_bad_files`, bad files are reported and read up to
    their fault.

    The bytes do not depend on the number of workers. The same call continues one that was killed,
    to the same bytes; if the dataset is complete, it does nothing and returns the same result,
    except that places in the corpus are None where there were any.

    Raises:
      UserError: an input cannot be used, a file is bad, no document is usable, or something else
        made `output`. Nothing is left behind except what can be continued.
    """
    output = any_path(output)
    found, loaded = _check_inputs(inputs, tokenizer, output, separator, skip_bad_files)
    by_hash = not any(file.split == "validation" for file in found.files)
    fields = Fields(column, source_field)
    encoder = Encoder(loaded, separator, fields, validation_fraction if by_hash else 0.0, limits)
    if sum(file.size for file in found.files) < limits.small_corpus:
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
    tally = Tally(found.files, fields, skip_bad_files)
    with workspace(output, command) as work:
        try:
            shards = _write_streams(work, tally, encoder, workers, shard_tokens)
        except BaseException:
            if work.state is not None:
                _note(f"{work.path} keeps the work done so far; rerun the command to continue")
            raise
        description = _describe(tally, encoder, shards) | {"command": command}
        (work.path / MODEL).write_bytes(loaded.model_bytes)
        write_durably(work.path / DESCRIPTION, description_bytes(description))
    missing = _missing_splits(description, found, by_hash and validation_fraction)
    for warning in (*missing, *_unknown_pieces(description, loaded)):
        print(f"cem: warning: {warning}", file=sys.stderr)
    return totals(description) | tally.report(found.ignored) | {"output": str(output)}


def _missing_splits(
    description: dict[str, Any], found: FoundFiles, fraction: float
) -> Iterator[str]:
    """Yield a message with the cause for each of the training and validation splits missing.

    `fraction`: the share of documents that goes to validation by hash; 0 if none can.
    """
    named = next((file for file in found.files if file.split), None)
    if "train" not in description["splits"]:
        why = (
            f"{named.path} is in a folder that names the {named.split} split"
            if named
            else f"all documents went to the validation split ({fraction:.2%} by hash)"
        )
        yield f"there is no training split: {why}"
    if not fraction or "validation" in description["splits"]:
        return
    if all(file.split for file in found.files):
        yield (
            "no validation split: every file is in a folder that names its split, such as "
            f"{named.path}, and only other files are split by hash ({fraction:.2%}); "
            "make a folder named validation"
        )
    else:
        yield (
            f"no document fell into the validation split ({fraction:.2%} by hash): a corpus this "
            "small needs a larger --validation-fraction, or a folder named validation"
        )


def _unknown_pieces(description: dict[str, Any], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a message if the tokenizer lost text, with the share of each split."""
    shares = {name: s["unknown"] / s["tokens"] for name, s in description["splits"].items()}
    if any(shares.values()):
        shown = ", ".join(f"{share:.2%} of {name}" for name, share in shares.items())
        yield (
            f"unknown pieces are {shown}: {tokenizer.name} cannot spell this text, which is lost, "
            "so bits per byte will not be reported; `cem tokenizer` makes one with byte fallback"
        )


def _check_inputs(
    inputs: Sequence[str | os.PathLike[str]],
    tokenizer: str | os.PathLike[str],
    output: Path,
    separator: str,
    skip_bad_files: bool,
) -> tuple[FoundFiles, Tokenizer]:
    """Open the inputs; raise one UserError with every fault that can be found before any work."""
    problems: list[str] = []
    found, loaded = FoundFiles((), ()), None
    with collecting(problems):
        found = find_files(inputs)
    with collecting(problems):
        loaded = Tokenizer.load(tokenizer)
        loaded.separator_ids(separator)
    with collecting(problems):
        if not was_made(output):
            require_free(output)
    for file in () if skip_bad_files else found.files:
        try:
            check_start(file.path)
        except BadFile as bad:
            problems.append(f"{file.path}: {bad} (--skip-bad-files continues without it)")
    if problems:
        raise UserError(*problems)
    return found, loaded


def _identity(found: FoundFiles) -> str:
    """Describe the input files by a text that any change to them alters."""
    digest = hashlib.blake2b(digest_size=8)
    for file in found.files:
        path = os.path.abspath(file.path) if isinstance(file.path, Path) else file.path
        digest.update(f"{path}\0{file.size}\0{file.version()}\0{file.split}\n".encode())
    size = sum(file.size for file in found.files)
    return f"{len(found.files):,} files of {size:,} bytes ({digest.hexdigest()})"


def _write_streams(
    work: Workspace, tally: Tally, encoder: Encoder, workers: int, shard_tokens: int
) -> dict[Stream, list[dict[str, Any]]]:
    """Encode the rest of the corpus; return the finished shards of each stream."""
    writers = StreamWriters(work.path, token_dtype(encoder.tokenizer.vocab_size), shard_tokens)
    progress = PrepareProgress([file.size for file in tally.files], sys.stderr)
    try:
        if work.state:
            _resume(work, tally, writers)
        progress.start(tally.current.index, tally.tokens)
        kept = time.monotonic()
        for encoded in encode_all(_batches(tally, encoder.limits, progress), encoder, workers):
            tally.add(encoded)
            for stream, part in encoded.parts.items():
                writers.append(stream, part.ids)
            progress.made(tally.documents, tally.tokens)
            if time.monotonic() - kept >= encoder.limits.keep_seconds:
                work.keep({"shards": writers.sync(), "tally": tally.state()})
                kept = time.monotonic()
        tally.require_documents()
        return writers.close()
    finally:
        progress.finish()
        writers.abandon()


def _resume(work: Workspace, tally: Tally, writers: StreamWriters) -> None:
    """Restore the writers and the tally to the state an earlier process recorded."""
    try:
        kept = work.state["tally"]
        writers.restore(work.state["shards"])
    except (OSError, KeyError) as error:  # damaged shards, or another version's journal
        writers.abandon()
        work.start_over()
        _note(f"{error}: starting over")
        return
    tally.restore(kept)
    _note(f"continuing after {tally.documents:,} documents of an earlier run")


def _batches(tally: Tally, limits: Limits, progress: PrepareProgress) -> Iterator[Batch]:
    """Read the records that are not tallied yet, in batches."""
    skipped = tally.current.records
    for index in range(tally.current.index, len(tally.files)):
        file = tally.files[index]
        on_position = functools.partial(progress.read, index)
        records: list[Record] = []
        size, fault = 0, None
        try:
            found = read_records(file.path, tally.fields, on_position, limits)
            for record in itertools.islice(found, skipped, None):
                full = len(records) >= limits.batch_records or size + record.size() > limits.batch
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
    tally: Tally, encoder: Encoder, shards: dict[Stream, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the content of dataset.json."""
    splits = {}
    for split in _SPLIT_ORDER:
        parts = sorted(item for item in tally.streams.items() if item[0].split == split)
        if not parts:
            continue
        splits[split] = {
            **asdict(sum((counts for _, counts in parts), NO_COUNTS)),
            "sources": {stream.source or "all": asdict(counts) for stream, counts in parts},
            "shards": [
                shard | ({"source": stream.source} if stream.source else {})
                for stream, _ in parts
                for shard in shards[stream]
            ],
        }
    tokenizer = encoder.tokenizer
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
        "dropped": dict(sorted(tally.dropped.items())),
        "repaired": dict(sorted(tally.repaired.items())),
        "bad_files": len(tally.bad_files),
    }


def totals(description: dict[str, Any]) -> dict[str, Any]:
    """Return a dataset.json's counts over all splits, and some of its entries."""
    splits = description["splits"].values()
    totals = {key: sum(s[key] for s in splits) for key in ("documents", "tokens", "bytes")}
    return totals | {
        key: description[key] for key in ("dropped", "repaired", "splits", "tokenizer")
    }


def _places_unknown(description: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `Tally.report`, as far as a finished dataset has them."""
    has_cases = description["dropped"] or description["repaired"]
    return {
        "cases": None if has_cases else [],
        "bad_files": None if description["bad_files"] else [],
    }


def _note(text: str) -> None:
    print(f"cem: note: {text}", file=sys.stderr)

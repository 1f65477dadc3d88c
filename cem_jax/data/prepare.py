"""`cem prepare`: a corpus and a tokenizer in, a dataset directory (see store.py) out."""

import argparse
import collections
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from cem_jax.data.compression import BadFile
from cem_jax.data.encoding import Batch, Encoded, Encoder, encode_all
from cem_jax.data.files import FoundFiles, SourceFile, find_files
from cem_jax.data.progress import PrepareProgress
from cem_jax.data.readers import Record, read_records
from cem_jax.data.shards import SHARD_TOKENS, ShardWriter, new_directory, require_free, token_dtype
from cem_jax.data.store import DESCRIPTION, FORMAT, MODEL, check_dataset
from cem_jax.data.tokenizer import Tokenizer
from cem_jax.errors import UserError

VALIDATION_FRACTION = 0.01
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 4096
_SMALL_CORPUS = 8 << 20  # bytes on disk below which starting workers costs more than it saves
_CASES = 10  # dropped or mended records listed by place
_SPLIT_ORDER = ("train", "validation", "test")


def run(args: argparse.Namespace) -> dict:
    """`cem prepare`, or `cem prepare --check DIR`; the JSON object of the command."""
    out = sys.stderr if args.json else sys.stdout
    if args.check is not None:
        description = check_dataset(args.check)
        result = _totals(description) | {"output": str(args.check)}
        print(f"{args.check}: every checksum, id and count agrees", file=out)
        _print_table(result, out)
        return result
    fraction = args.validation_fraction
    result = prepare(
        args.input,
        args.tokenizer,
        args.output,
        column=args.text_column,
        separator=args.separator,
        workers=args.workers,
        skip_bad_files=args.skip_bad_files,
        validation_fraction=VALIDATION_FRACTION if fraction is None else fraction,
    )
    _print_table(result, out)
    return result


def prepare(
    inputs: Sequence[str],
    tokenizer: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    column: str = "text",
    separator: str = "bos",
    workers: int = 1,
    skip_bad_files: bool = False,
    validation_fraction: float = VALIDATION_FRACTION,
    shard_tokens: int = SHARD_TOKENS,
) -> dict:
    """Write `output`: train, validation and test streams of token ids, and what was dropped.

    Splits are named by folders (see `find_files`). Where no folder names a validation split,
    a document of the rest goes there if its hash falls below `validation_fraction`. The result
    is the same for every number of workers. Bad records are skipped and counted by reason; a
    bad file raises UserError, or is reported and left at its fault with `skip_bad_files`.

    Raises UserError, leaving nothing behind, also when no document is usable.
    """
    found, loaded = _check_inputs(inputs, tokenizer, Path(output), separator)
    by_hash = not any(file.split == "validation" for file in found.files)
    encoder = Encoder(
        loaded.model_bytes, separator, column, validation_fraction if by_hash else 0.0
    )
    if sum(file.size for file in found.files) < _SMALL_CORPUS:
        workers = 1
    with new_directory(Path(output)) as partial:
        corpus = _Corpus(found.files, skip_bad_files, column)
        dtype = token_dtype(loaded.vocab_size)
        writers = {name: ShardWriter(partial, name, dtype, shard_tokens) for name in _SPLIT_ORDER}
        try:
            for encoded in encode_all(corpus.batches(), encoder, workers):
                corpus.add(encoded)
                for name, part in encoded.parts.items():
                    writers[name].append(part.ids)
            corpus.finish()
            shards = {name: writer.close() for name, writer in writers.items()}
        finally:
            for writer in writers.values():
                writer.abandon()
        description = corpus.describe(loaded, separator, shards)
        (partial / MODEL).write_bytes(loaded.model_bytes)
        (partial / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
    if by_hash and validation_fraction and not description["splits"].get("validation"):
        print(
            f"cem: warning: no document fell into the validation split ({validation_fraction:.2%} "
            "by hash): a corpus this small needs a larger --validation-fraction, or a folder named "
            "validation",
            file=sys.stderr,
        )
    return _totals(description) | corpus.report(found.ignored) | {"output": str(output)}


def _check_inputs(
    inputs: Sequence[str], tokenizer: str | os.PathLike[str], output: Path, separator: str
) -> tuple[FoundFiles, Tokenizer]:
    """Everything that can be wrong before any work, in one UserError."""
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
        require_free(output)
    except UserError as error:
        problems += error.messages
    if problems:
        raise UserError(*problems)
    return found, loaded


@dataclass
class _FileTally:
    records: int = 0
    missing_column: int = 0
    bad: bool = False


@dataclass
class _Corpus:
    """Reads the files into batches and keeps the accounts of what came out of them."""

    files: tuple[SourceFile, ...]
    skip_bad_files: bool
    column: str
    dropped: collections.Counter[str] = field(default_factory=collections.Counter)
    repaired: collections.Counter[str] = field(default_factory=collections.Counter)
    cases: list[str] = field(default_factory=list)
    bad_files: list[str] = field(default_factory=list)
    tallies: dict[int, _FileTally] = field(default_factory=dict)
    judged: int = 0  # files before this one
    documents: collections.Counter[str] = field(default_factory=collections.Counter)
    tokens: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: collections.Counter[str] = field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        self.progress = PrepareProgress(sum(file.size for file in self.files), sys.stderr)

    def batches(self) -> Iterator[Batch]:
        """Records of every file in order; a bad file ends early, in an error unless skipped."""
        finished = 0
        for index, file in enumerate(self.files):
            records: list[Record] = []
            size = 0
            self.tallies[index] = _FileTally()
            try:
                for record in read_records(
                    file.path, self.column, lambda at, base=finished: self.progress.read(base + at)
                ):
                    records.append(record)
                    size += record.size()
                    if size >= _BATCH_BYTES or len(records) >= _BATCH_RECORDS:
                        yield Batch(index, file.split, records)
                        records, size = [], 0
            except BadFile as bad:
                self._bad_file(index, str(bad))
            if records:
                yield Batch(index, file.split, records)
            finished += file.size

    def add(self, encoded: Encoded) -> None:
        """Count one encoded batch; batches come in order."""
        self._judge_files_before(encoded.file)
        tally = self.tallies[encoded.file]
        path = self.files[encoded.file].path
        for line, reason in encoded.dropped:
            self._note(self.dropped, reason, f"{path}:{line}: {reason}")
            tally.missing_column += reason == "missing_column"
        for line, fault in encoded.repaired:
            self._note(self.repaired, fault, f"{path}:{line}: {fault} (mended)")
        for name, part in encoded.parts.items():
            self.documents[name] += part.documents
            self.tokens[name] += part.ids.size
            self.bytes[name] += part.bytes
        tally.records += len(encoded.dropped) + sum(p.documents for p in encoded.parts.values())
        self.progress.made(self.documents.total(), self.tokens.total())

    def finish(self) -> None:
        """Judge what is left to judge; raises UserError when no document was usable."""
        self.progress.close()
        self._judge_files_before(len(self.files))
        if not self.documents.total():
            raise UserError(
                f"no usable document in {len(self.files)} input file(s); dropped: "
                + _reasons(self.dropped),
                *self.cases,
                *self.bad_files,
            )

    def describe(self, tokenizer: Tokenizer, separator: str, shards: dict[str, list]) -> dict:
        """The content of dataset.json."""
        splits = {}
        for name in _SPLIT_ORDER:
            if self.documents[name]:
                counts = {
                    "tokens": self.tokens[name],
                    "documents": self.documents[name],
                    "bytes": self.bytes[name],
                }
                splits[name] = counts | {"sources": {"all": counts}, "shards": shards[name]}
        return {
            "format": FORMAT,
            "tokenizer": {
                "hash": tokenizer.hash,
                "vocab_size": tokenizer.vocab_size,
                "separator": separator,
            },
            "splits": splits,
            "dropped": dict(sorted(self.dropped.items())),
            "repaired": dict(sorted(self.repaired.items())),
            "bad_files": len(self.bad_files),
        }

    def report(self, ignored: Sequence[Path]) -> dict:
        """Tell on standard error what did not become data, with places; the same as JSON."""
        if ignored:
            kinds = ", ".join(sorted({path.suffix or path.name for path in ignored})[:8])
            print(f"cem: note: {len(ignored)} files of other formats: {kinds}", file=sys.stderr)
        total = self.dropped.total()
        if self.cases:
            share = total / (total + self.documents.total())
            print(
                f"cem: warning: {total:,} records dropped ({share:.2%}): {_reasons(self.dropped)}; "
                f"{self.repaired.total():,} mended: {_reasons(self.repaired)}",
                *(f"  {case}" for case in self.cases),
                sep="\n",
                file=sys.stderr,
            )
        for bad in self.bad_files:
            print(f"cem: warning: bad file: {bad}", file=sys.stderr)
        return {"cases": self.cases, "bad_files": self.bad_files}

    def _judge_files_before(self, end: int) -> None:
        """Files whose records all came: a column missing throughout is the file's fault."""
        for index in range(self.judged, end):
            tally = self.tallies[index]
            if tally.records and tally.missing_column == tally.records:
                self._bad_file(index, f"has no column {self.column!r} in any record")
            elif not tally.records and not tally.bad:
                path = self.files[index].path
                self._note(self.dropped, "empty_file", f"{path}: empty_file")
        self.judged = max(self.judged, end)

    def _note(self, counts: collections.Counter[str], reason: str, case: str) -> None:
        counts[reason] += 1
        if len(self.cases) < _CASES:
            self.cases.append(case)

    def _bad_file(self, index: int, fault: str) -> None:
        message = f"{self.files[index].path}: {fault}"
        if not self.skip_bad_files:
            raise UserError(
                f"{message} (--skip-bad-files keeps what comes before the fault and goes on)"
            )
        self.tallies[index].bad = True
        self.bad_files.append(message)


def _totals(description: dict) -> dict:
    splits = description["splits"].values()
    totals = {key: sum(s[key] for s in splits) for key in ("documents", "tokens", "bytes")}
    return totals | {
        key: description[key] for key in ("dropped", "repaired", "splits", "tokenizer")
    }


def _print_table(result: dict, out: TextIO) -> None:
    print(f"{'split':<12}{'documents':>12}{'tokens':>16}{'bytes':>16}{'bytes/token':>13}", file=out)
    for name, s in result["splits"].items():
        ratio = s["bytes"] / s["tokens"]
        print(
            f"{name:<12}{s['documents']:>12,}{s['tokens']:>16,}{s['bytes']:>16,}{ratio:>13.2f}",
            file=out,
        )


def _reasons(dropped: collections.Counter[str]) -> str:
    return ", ".join(f"{reason} {n:,}" for reason, n in sorted(dropped.items())) or "none"

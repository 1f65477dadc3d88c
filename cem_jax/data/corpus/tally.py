"""Counts of a corpus: documents, tokens and bytes by stream, and what was dropped and why."""

import collections
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cem_jax.data.corpus.encoding import Encoded
from cem_jax.data.corpus.files import SourceFile
from cem_jax.data.corpus.readers import HARMLESS, Fields
from cem_jax.data.corpus.shards import Stream
from cem_jax.data.dataset.store import NO_COUNTS, Counts
from cem_jax.errors import UserError
from cem_jax.storage.paths import AnyPath

_CASES = 10  # dropped or mended records listed with their places
_WORRYING = 0.01  # share of dropped records above which the note is a warning
_MOST_SOURCES = 256


@dataclass
class _FileTally:
    """Counts of the file being read."""

    index: int = 0
    records: int = 0
    unusable: dict[str, int] = field(default_factory=dict)  # by reason, without the harmless ones
    documents: int = 0
    without_source: int = 0


@dataclass
class Tally:
    """Counts updated batch by batch, in order; `current` says how far the corpus was read."""

    files: tuple[SourceFile, ...]
    fields: Fields
    skip_bad_files: bool
    current: _FileTally = field(default_factory=_FileTally)
    streams: dict[Stream, Counts] = field(default_factory=dict)
    dropped: collections.Counter[str] = field(default_factory=collections.Counter)
    repaired: collections.Counter[str] = field(default_factory=collections.Counter)
    dropped_cases: list[str] = field(default_factory=list)
    repaired_cases: list[str] = field(default_factory=list)
    bad_files: list[str] = field(default_factory=list)

    _LISTS = ("dropped_cases", "repaired_cases", "bad_files")

    def state(self) -> dict[str, Any]:
        """Return everything counted, as JSON can hold it."""
        return {name: getattr(self, name) for name in self._LISTS} | {
            "dropped": dict(self.dropped),
            "repaired": dict(self.repaired),
            "streams": [[*stream, asdict(counts)] for stream, counts in self.streams.items()],
            "current": asdict(self.current),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; raise UserError if it skipped files now refused."""
        for name in self._LISTS:
            setattr(self, name, state[name])
        self.dropped.update(state["dropped"])
        self.repaired.update(state["repaired"])
        self.streams = {Stream(*names): Counts(**counts) for *names, counts in state["streams"]}
        self.current = _FileTally(**state["current"])
        if self.bad_files and not self.skip_bad_files:
            raise UserError(
                *(f"{bad} (skipped before, with --skip-bad-files)" for bad in self.bad_files)
            )

    @property
    def documents(self) -> int:
        return sum(counts.documents for counts in self.streams.values())

    @property
    def tokens(self) -> int:
        return sum(counts.tokens for counts in self.streams.values())

    def add(self, encoded: Encoded) -> None:
        """Count one encoded batch. Raises UserError for a bad file, unless they are skipped."""
        path, current = self.files[encoded.batch.file].path, self.current
        for line, reason in encoded.dropped:
            self.dropped[reason] += 1
            _note(self.dropped_cases, f"{path}:{line}: {reason}")
            if reason not in HARMLESS:
                current.unusable[reason] = current.unusable.get(reason, 0) + 1
        for line, fault in encoded.repaired:
            self.repaired[fault] += 1
            _note(self.repaired_cases, f"{path}:{line}: {fault} (mended)")
        for stream, part in encoded.parts.items():
            self.streams[stream] = self.streams.get(stream, NO_COUNTS) + part.counts
            current.documents += part.counts.documents
        self._require_few_sources()
        current.records += encoded.records
        current.without_source += encoded.without_source
        if encoded.batch.is_last:
            self._judge(path, encoded.batch.fault)
            self.current = _FileTally(current.index + 1)

    def require_documents(self) -> None:
        """Raise UserError when no document was usable."""
        if not self.documents:
            raise UserError(
                f"no usable document in {len(self.files)} input file(s); dropped: "
                + _reasons(self.dropped),
                *self.dropped_cases,
                *self.bad_files,
            )

    def report(self, ignored: Sequence[AnyPath]) -> dict[str, Any]:
        """Print what was left out, with places, to standard error; return it for JSON."""
        lines: list[str] = []
        if ignored:
            kinds = ", ".join(sorted({path.suffix or path.name for path in ignored})[:8])
            lines.append(f"cem: note: {len(ignored)} files of other formats ignored: {kinds}")
        cases = self.dropped_cases + self.repaired_cases
        if cases:
            total = self.dropped.total()
            share = total / (total + self.documents)
            lines.append(
                f"cem: {'warning' if share > _WORRYING else 'note'}: {total:,} records dropped "
                f"({share:.2%}): {_reasons(self.dropped)}; {self.repaired.total():,} mended: "
                f"{_reasons(self.repaired)}; the first of them:"
            )
            lines += [f"  {case}" for case in cases]
        lines += [f"cem: warning: bad file: {bad}" for bad in self.bad_files]
        for line in lines:
            print(line, file=sys.stderr)
        return {"cases": cases, "bad_files": self.bad_files}

    def _judge(self, path: AnyPath, fault: str | None) -> None:
        """Decide whether a file is bad: a fault that all of its records have is the file's."""
        tally = self.current
        if fault:
            self._bad_file(path, fault)
        elif not tally.records:
            self.dropped["empty_file"] += 1
            _note(self.dropped_cases, f"{path}: empty_file")
        elif tally.unusable.get("missing_column") == tally.records:
            self._bad_file(path, f"has no column {self.fields.text!r} in any record")
        elif sum(tally.unusable.values()) == tally.records:
            self._bad_file(
                path, f"none of its {tally.records:,} records is valid: {_reasons(tally.unusable)}"
            )
        elif tally.documents and tally.without_source == tally.documents:
            self._bad_file(path, f"has no field {self.fields.source!r} in any record")

    def _bad_file(self, path: AnyPath, fault: str) -> None:
        if not self.skip_bad_files:
            places = [case for case in self.dropped_cases if case.startswith(f"{path}:")]
            raise UserError(
                f"{path}: {fault} (--skip-bad-files keeps what comes before the fault)",
                *places[:3],
            )
        self.bad_files.append(f"{path}: {fault}")

    def _require_few_sources(self) -> None:
        sources = {stream.source for stream in self.streams}
        if len(sources) > _MOST_SOURCES:
            shown = ", ".join(sorted(sources)[:5])
            raise UserError(
                f"--source-field {self.fields.source} has more than {_MOST_SOURCES} values "
                f"({shown}, …): it does not name sources"
            )


def _note(cases: list[str], case: str) -> None:
    if len(cases) < _CASES:
        cases.append(case)


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {n:,}" for reason, n in sorted(counts.items())) or "none"

"""Mixtures: one dataset, or several with weights, in directories or at URLs."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from cem_jax.data.dataset.fetch import fetched
from cem_jax.data.dataset.store import Dataset, open_dataset
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError, collecting
from cem_jax.storage.paths import is_url

_FINEST = 1_000_000  # weights are rounded to one part in a million


@dataclass(frozen=True)
class Mixture:
    """Datasets with one tokenizer and separator, and integer shares of the windows."""

    sources: tuple[Dataset, ...]
    shares: tuple[int, ...]

    @property
    def tokenizer_hash(self) -> str:
        return self.sources[0].tokenizer_hash

    @property
    def vocab_size(self) -> int:
        return self.sources[0].vocab_size

    @property
    def separator(self) -> str:
        return self.sources[0].separator

    @property
    def fingerprint(self) -> str:
        """An identifier of all contents and shares; that of a single dataset is its own."""
        if len(self.sources) == 1:
            return self.sources[0].fingerprint
        parts = zip(self.sources, self.shares, strict=True)
        return " + ".join(f"{share}·{source.fingerprint}" for source, share in parts)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources, in order."""
        return tuple(source.name for source in self.sources)

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer that all sources share."""
        return self.sources[0].load_tokenizer()

    def parts(self, split: str) -> tuple[Dataset, ...]:
        """Return the parts in which a split is evaluated: named sources, or else whole datasets.

        Raises UserError when a dataset has no such split; one of its sources may lack it.
        """
        parts = []
        for source in self.sources:
            if source.source and split not in source.splits:
                continue
            names = source.split(split).sources
            parts += [source.only(name) for name in names] if names else [source]
        if not parts:
            self.sources[0].split(split)  # raises
        return tuple(parts)


def single(dataset: Dataset) -> Mixture:
    """Return a mixture of one dataset."""
    return Mixture((dataset,), (1,))


def open_source(place: str | os.PathLike[str], cache: str | None = None) -> Dataset:
    """Open the dataset in a directory or at a URL (fetched into `cache`).

    `place#source` is one of its named sources. Raises UserError when there is no such dataset or
    source.
    """
    place = os.fspath(place)
    directory, _, source = place.rpartition("#")
    if not directory or os.path.isdir(place):
        directory, source = place, ""
    elif not source:
        raise UserError(f"{place}: names no source after the #")
    if is_url(directory):
        copy = fetched(directory, cache)
        try:
            dataset = replace(open_dataset(copy), url=directory)
        except UserError as error:
            again = f"{copy} is a copy of {directory}: remove it to fetch it again"
            raise UserError(*error.messages, again) from None
    else:
        dataset = open_dataset(directory)
    return dataset.only(source) if source else dataset


def open_mixture(entries: Sequence[str], cache: str | None = None) -> Mixture:
    """Open `place=weight` entries (see `open_source`); weights are positive, with any sum.

    Raises UserError with every malformed entry, unusable dataset, and difference in tokenizer or
    separator.
    """
    problems: list[str] = []
    sources: list[Dataset] = []
    weights: list[Fraction] = []
    for entry in entries:
        place, _, weight = entry.rpartition("=")
        try:
            value = Fraction(weight)
        except (ValueError, ZeroDivisionError):
            value = Fraction(0)
        if not place or value <= 0:
            problems.append(f"mixture entry {entry!r} is not directory=weight with a weight > 0")
            continue
        with collecting(problems):
            sources.append(open_source(place, cache))
            weights.append(value)
    if not entries:
        problems.append("the mixture is empty: give directory=weight entries")
    for i, other in enumerate(sources):
        problems += _mismatch(sources[0], other)
        for before in sources[:i]:
            if _share_windows(before, other):
                twice = other.name if other.name == before.name else f"{other.name}: {before.name}"
                problems.append(f"{twice} is in the mixture twice: give it one weight")
    if problems:
        raise UserError(*problems)
    return Mixture(tuple(sources), _integer_shares(weights))


def _share_windows(one: Dataset, other: Dataset) -> bool:
    """Return whether they overlap: the same data under any name, or a whole and its source."""
    whole, other_whole = (d.fingerprint.partition("#")[0] for d in (one, other))
    return whole == other_whole and (
        one.source == other.source or not (one.source and other.source)
    )


def _mismatch(first: Dataset, other: Dataset) -> list[str]:
    problems = []
    if other.tokenizer_hash != first.tokenizer_hash:
        problems.append(
            f"{first.name} was made with tokenizer {first.tokenizer_hash}, {other.name} with "
            f"{other.tokenizer_hash}: a mixture needs one tokenizer"
        )
    if other.separator != first.separator:
        problems.append(
            f"{first.name} has separator {first.separator!r}, {other.name} {other.separator!r}"
        )
    return problems


def _integer_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    total = sum(weights)
    shares = [max(1, round(weight / total * _FINEST)) for weight in weights]
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)

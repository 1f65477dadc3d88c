"""Limits on what `cem prepare` holds in memory, and how often it records its progress."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, unless named otherwise; none but `largest` changes the dataset."""

    batch: int = 1 << 20  # records encoded together
    batch_records: int = 4096
    small_corpus: int = 8 << 20  # as stored; below it, starting workers costs more than it saves
    keep_seconds: float = 5.0  # between points that a killed run can continue from
    largest: int = 512 << 20  # longer records are dropped as too_long
    long_json: int = 4 << 20  # JSON records of this size or more are parsed without long strings
    long_string: int = (
        1 << 20
    )  # in such records, strings of this size or more are decoded in pieces
    piece: int = 1 << 20  # part of a long text decoded at a time


LIMITS = Limits()

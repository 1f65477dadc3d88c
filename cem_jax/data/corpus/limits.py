"""How much `cem prepare` holds and how often it records its progress."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, unless named otherwise; none of them changes the resulting dataset."""

    batch: int = 1 << 20  # of records encoded together
    batch_records: int = 4096
    small_corpus: int = 8 << 20  # as stored; below it, starting workers costs more than it saves
    keep_seconds: float = 5.0  # between the points that a killed run continues from
    largest: int = 512 << 20  # a record beyond it is dropped as too long
    long_json: int = 4 << 20  # a JSON record from this size on is parsed without its long strings
    long_string: int = 1 << 20  # within such a record: one that is decoded in pieces
    piece: int = 1 << 20  # of a long text decoded at a time


LIMITS = Limits()

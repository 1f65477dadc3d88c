"""Values of configuration fields: checking them against a type, and parsing them from flags.

The types are those of `cem_jax.config`: bool, int, float, str, `Literal` of strings, `X | None`,
`tuple[X, ...]` and tuples of fixed length, each optionally `Annotated` with a `Range`. This module
does not know the fields themselves and imports nothing heavy.
"""

import math
import numbers
import os
import types
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

_LARGEST_INTEGER = 2**63 - 1
_TRUE = ("true", "1")
_FALSE = ("false", "0")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `above` and `below` exclude the end they name."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        parts = (
            (self.low, "at least"),
            (self.above, "greater than"),
            (self.high, "at most"),
            (self.below, "less than"),
        )
        return " and ".join(f"{words} {end:,}" for end, words in parts if end is not None)


def describe(annotation: Any) -> str:
    """Describe the type in plain words: `an integer or None`."""
    inner, optional, _ = _kind(annotation)
    if get_origin(inner) is Literal:
        words = "one of " + ", ".join(get_args(inner))
    elif get_origin(inner) is tuple:
        words = _describe_tuple(inner)
    else:
        words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[
            inner
        ]
    return words + " or None" if optional else words


def coerce(value: Any, annotation: Any) -> Any:
    """Return `value` as the field's type.

    The only conversions are int to float, list to tuple, a path to its text, and NumPy and JAX
    scalars to Python scalars. Raises ValueError with the reason, which does not name the field.
    """
    inner, optional, ranges = _kind(annotation)
    value = _unboxed(value)
    if value is None:
        if optional:
            return None
        raise ValueError(f"expected {describe(annotation)}, got None")
    if get_origin(inner) is tuple:
        return _coerce_tuple(value, inner, annotation)
    if get_origin(inner) is Literal:
        return _coerce_choice(value, get_args(inner))
    if not _has_type(value, inner):
        raise ValueError(
            f"expected {describe(annotation)}, got {value!r} (of type {type(value).__name__})"
        )
    value = inner(value)  # an int becomes a float
    if inner is float and not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value}")
    if inner is int and abs(value) > _LARGEST_INTEGER:
        raise ValueError(f"{value} does not fit in 64 bits")
    for limits in ranges:
        if not limits.holds(value):
            raise ValueError(f"{value:,} is out of range: must be {limits}")
    return value


def parse(text: str, annotation: Any) -> Any:
    """Parse a field's value from command-line text.

    Integers may be written 1_000 or 1e9, booleans true, false, 1 or 0, tuples `1,2`, `(1,2)` or
    `[1,2]`; None unsets an optional field. Raises ValueError with the reason.
    """
    inner, optional, _ = _kind(annotation)
    stripped = text.strip()
    if optional and stripped in ("None", "none", "null"):
        return None
    if inner is str or get_origin(inner) is Literal:
        return coerce(text, annotation)
    if get_origin(inner) is tuple:
        return coerce(_parse_tuple(stripped, inner, annotation), annotation)
    parser = {bool: _parse_bool, int: _parse_int, float: float}[inner]
    try:
        value = parser(stripped)
    except ValueError:
        raise ValueError(f"expected {describe(annotation)}, got {text!r}") from None
    return coerce(value, annotation)


class _Kind(NamedTuple):
    """An annotation taken apart: `Annotated[int, Range(low=1)] | None`."""

    bare: Any  # int
    optional: bool
    ranges: tuple[Range, ...]  # from every level around the bare type


def _kind(annotation: Any) -> _Kind:
    if get_origin(annotation) is Annotated:
        first, *notes = get_args(annotation)
        inner = _kind(first)
        found = tuple(note for note in notes if isinstance(note, Range))
        return inner._replace(ranges=found + inner.ranges)
    if get_origin(annotation) in (Union, types.UnionType):
        (member,) = (m for m in get_args(annotation) if m is not types.NoneType)
        return _kind(member)._replace(optional=True)
    return _Kind(annotation, False, ())


def _unboxed(value: Any) -> Any:
    """Return scalars and 0-d arrays as Python values, paths as text, and all else unchanged."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _has_type(value: Any, inner: type) -> bool:
    if inner is bool or isinstance(value, bool):
        return inner is bool and isinstance(value, bool)
    if inner is int:
        return isinstance(value, numbers.Integral)
    if inner is float:
        return isinstance(value, numbers.Real)
    return isinstance(value, inner)


def _coerce_choice(value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}, got {value!r}")
    return str(value)


def _describe_tuple(inner: Any) -> str:
    members = get_args(inner)
    plural = {int: "integers", float: "numbers", str: "strings"}[_kind(members[0]).bare]
    if members[-1] is Ellipsis:
        return f"a sequence of {plural}"
    return f"{len(members)} {plural}"


def _coerce_tuple(value: Any, inner: Any, annotation: Any) -> tuple:
    if not isinstance(value, tuple | list):
        raise ValueError(
            f"expected {describe(annotation)}, got {value!r} (of type {type(value).__name__})"
        )
    members = get_args(inner)
    if members[-1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(value) != len(members):
        raise ValueError(f"expected {describe(annotation)}, got {len(value)} of them")
    return tuple(coerce(item, member) for item, member in zip(value, members, strict=True))


def _parse_tuple(stripped: str, inner: Any, annotation: Any) -> list:
    for opening, closing in ("()", "[]"):
        if stripped.startswith(opening) != stripped.endswith(closing):
            raise ValueError(f"expected {describe(annotation)}, got {stripped!r}")
        if stripped.startswith(opening):
            stripped = stripped[1:-1].strip()
            break
    items = [item.strip().strip("'\"") for item in stripped.split(",")]
    if items[-1] == "":  # no item, or a trailing comma as in (1,)
        items.pop()
    members = get_args(inner)
    kinds = [members[min(i, len(members) - 1)] for i in range(len(items))]
    if members[-1] is Ellipsis:
        kinds = [members[0]] * len(items)
    return [parse(item, kind) for item, kind in zip(items, kinds, strict=True)]


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError


def _parse_int(text: str) -> int:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError from None
    # Check the exponent first: 1e999999999 as an integer would not fit in memory.
    if not number.is_finite() or number.adjusted() > 19 or number != number.to_integral_value():
        raise ValueError
    return int(number)

"""Values from text and from Python that each field type accepts and refuses."""

from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cem_jax.config.values import Range, coerce, parse

Count = Annotated[int, Range(low=1)]
Choice = Literal["silu", "gelu"]
Pair = tuple[Count, Count] | None
Names = tuple[str, ...]


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("7", int, 7),
        ("1_000", int, 1000),
        ("1e9", int, 10**9),
        ("2.5e3", int, 2500),
        (" -3 ", int, -3),
        ("9007199254740993", int, 2**53 + 1),  # a float would round it
        ("1", float, 1.0),
        ("1e-3", float, 0.001),
        ("true", bool, True),
        ("False", bool, False),
        ("0", bool, False),
        ("1", bool, True),
        ("None", int | None, None),
        ("None", str, "None"),
        ("none", Literal["none", "shared"], "none"),
        ("", str, ""),
        ("a=b", str, "a=b"),
        ("gelu", Choice, "gelu"),
        ("None", Pair, None),
        ("1,2", Pair, (1, 2)),
        ("(1, 2)", Pair, (1, 2)),
        ("[1,2,]", Pair, (1, 2)),
        ("", Names, ()),
        ("()", Names, ()),
        ("[]", Names, ()),
        ("a", Names, ("a",)),
        ("('a=1', \"b=2\")", Names, ("a=1", "b=2")),
    ],
)
def test_parse(text, annotation, value):
    result = parse(text, annotation)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "annotation", "words"),
    [
        ("x", int, "expected an integer, got 'x'"),
        ("", int, "expected an integer"),
        ("7.5", int, "expected an integer, got '7.5'"),
        ("nan", int, "expected an integer"),
        ("1e999999999", int, "expected an integer"),
        ("None", int, "expected an integer, got 'None'"),
        ("1e19", int, "does not fit in 64 bits"),
        ("0", Count, "0 is out of range: must be at least 1"),
        ("-1", Annotated[int | None, Range(low=0)], "-1 is out of range"),
        ("nan", float, "expected a finite number, got nan"),
        ("-inf", float, "expected a finite number"),
        ("one", float | None, "expected a number or None, got 'one'"),
        ("1", Annotated[float, Range(low=0, below=1)], "must be at least 0 and less than 1"),
        ("0", Annotated[float, Range(above=0, high=1)], "must be greater than 0 and at most 1"),
        ("yes", bool, "expected true or false, got 'yes'"),
        ("", bool, "expected true or false"),
        ("Silu", Choice, "expected one of silu, gelu, got 'Silu'"),
        ("1,2,3", Pair, "expected 2 integers or None, got 3"),
        ("1", Pair, "expected 2 integers or None, got 1"),
        ("(1,2", Pair, "expected 2 integers or None, got '(1,2'"),
        ("1,x", Pair, "expected an integer, got 'x'"),
        ("1,0", Pair, "0 is out of range"),
    ],
)
def test_parse_refuses(text, annotation, words):
    with pytest.raises(ValueError) as caught:
        parse(text, annotation)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("value", "annotation", "result"),
    [
        (2, float, 2.0),
        (np.float32(0.5), float, 0.5),
        (np.int64(3), int, 3),
        (np.array(3), int | None, 3),
        (jnp.int32(3), Count, 3),
        (jnp.bfloat16(0.5), float, 0.5),
        (np.bool_(True), bool, True),
        (np.str_("gelu"), Choice, "gelu"),
        ([np.int32(1), 2], Pair, (1, 2)),
        (Path("data/mine"), str, "data/mine"),
        ([1, 2], tuple[int, int], (1, 2)),
        (None, float | None, None),
    ],
)
def test_coerce_converts(value, annotation, result):
    converted = coerce(value, annotation)
    assert converted == result
    assert type(converted) is type(result)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, int),
        (False, float),
        (1, bool),
        (1.0, int),
        ("1", int),
        ("0.1", float | None),
        (0.5, str),
        (None, int),
        (float("nan"), float),
        ("ab", tuple[str, ...]),
        (3, Choice),
        (np.array(["gelu"]), Choice),
        (np.array([1]), int),
        (np.float32(1), int),
        (np.True_, int),
        (np.int64(1), bool),
        ([1, "a"], tuple[int, int]),
    ],
)
def test_coerce_refuses_other_types(value, annotation):
    with pytest.raises(ValueError, match="expected"):
        coerce(value, annotation)


@settings(deadline=None, derandomize=True)
@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_every_integer_survives_its_text(number):
    assert parse(str(number), int) == number
    assert parse(f"{number:_}", int) == number


@settings(deadline=None, derandomize=True)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_its_text(number):
    assert parse(repr(number), float) == number


@settings(deadline=None, derandomize=True)
@given(st.text())
def test_any_text_is_a_value_or_a_reason(text):
    for annotation in (int, float, bool, Choice, Pair, Names, float | None):
        try:
            parse(text, annotation)
        except ValueError as error:
            assert str(error)

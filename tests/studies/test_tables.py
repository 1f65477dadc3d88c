"""The formatting of a report's tables."""

import pytest

from cem_jax.studies.figures import tables


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((63.7761, 0.77588), "63.8 ± 0.8"),
        ((71.48,), "71.5"),
        ((9.8765, 0.0123), "9.88 ± 0.01"),
        ((float("inf"),), "inf"),
    ],
)
def test_perplexities(arguments, text):
    assert tables.perplexity(*arguments) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0.0250, 0.008521), "+0.025 ± 0.009"),
        ((-0.0026, None), "-0.003"),
        ((-0.00004, None), "0.000"),
        ((0.00004, 0.01), "0.000 ± 0.010"),
    ],
)
def test_differences_have_three_decimals_and_zero_no_sign(arguments, text):
    assert tables.difference(*arguments) == text

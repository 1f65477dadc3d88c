"""How a report writes its numbers: few digits, the same for the same quantity everywhere.

Perplexities have one decimal from 10 on and two below, losses and their differences (nats) three;
what follows ± has as many as what stands before it. An absent number is a dash. JSON and CSV keep
every digit.
"""

from typing import Any

ABSENT = "–"


def perplexity(mean: float, deviation: float | None = None) -> str:
    """63.8 ± 0.8; `deviation`: over seeds, None for one of them."""
    return _with_spread(mean, deviation, 1 if abs(mean) >= 10 else 2)


def nats(value: float, spread: float | None = None) -> str:
    """4.155 ± 0.012."""
    return _with_spread(value, spread, 3)


def difference(value: float, interval: float | None) -> str:
    """+0.025 ± 0.009, in nats; 0.000 without a sign for what is no larger."""
    text = nats(value, interval)
    return text if value < 0 or text.startswith("0.000") else f"+{text}"


def rate(value: float) -> str:
    """A learning rate."""
    return f"{value:.3g}"


def shown(value: Any) -> str:
    """Anything else: whole numbers with commas, others with four digits."""
    if value is None:
        return ABSENT
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3g}"
    return str(value)


def _with_spread(value: float, spread: float | None, decimals: int) -> str:
    text = f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0: no negative zero
    return text if spread is None else f"{text} ± {spread:.{decimals}f}"

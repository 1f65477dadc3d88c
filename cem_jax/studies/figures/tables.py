"""A report's numbers and tables as text.

Few digits, the same for the same quantity everywhere: perplexities have one decimal from 10 on and
two below, losses and their differences (nats) three; a number after ± has as many as the first.
An absent number is a dash. JSON and CSV keep every digit.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from cem_jax.studies.figures.results import BestRate, Difference, Line
from cem_jax.studies.figures.scaling import WORTH_DECIDING, Comparison, Estimate, Power
from cem_jax.text import format_count

Table = list[dict[str, str]]  # heading -> text of a line


def perplexity(mean: float, deviation: float | None = None) -> str:
    """Format as 63.8 ± 0.8; `deviation` is over seeds, None for a single seed."""
    return _with_spread(mean, deviation, 1 if abs(mean) >= 10 else 2)


def nats(value: float | None, spread: float | None = None) -> str:
    """Format as 4.155 ± 0.012."""
    return shown(None) if value is None else _with_spread(value, spread, 3)


def difference(value: float, interval: float | None) -> str:
    """Format as +0.025 ± 0.009, in nats; what rounds to zero is 0.000 without a sign."""
    text = nats(value, interval)
    return text if value < 0 or text.startswith("0.000") else f"+{text}"


def rate(best: BestRate | Line | Comparison) -> str:
    """Format a learning rate; for a best one, say if it is at an end of the range."""
    edge = ", an end of the range" if getattr(best, "at_edge", False) else ""
    return f"{best.learning_rate:.3g}{edge}"


def multiplier(found: Estimate | None) -> str:
    """Format as 0.93 (0.85 to 1.02); ∞ where Llama's curve does not fall that far."""
    if found is None:
        return shown(None)
    text = lambda value: "∞" if value == math.inf else f"{value:.3g}"
    interval = "" if found.low is None else f" ({text(found.low)} to {text(found.high)})"
    return text(found.value) + interval


def estimated_difference(found: Estimate | None) -> str:
    """Format like `difference`, with half the width of the interval."""
    if found is None:
        return shown(None)
    return difference(found.value, None if found.low is None else (found.high - found.low) / 2)


def shown(value: Any) -> str:
    """Format anything else: whole numbers with commas, others with four digits."""
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3g}"
    return str(value)


def _with_spread(value: float, spread: float | None, decimals: int) -> str:
    text = f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0 avoids a negative zero
    return text if spread is None else f"{text} ± {spread:.{decimals}f}"


def of_lines(lines: Iterable[Line]) -> Table:
    """Tabulate a figure's points. Seconds depend on other load, as their heading says."""
    return [
        {
            "size": line.size,
            "arm": line.arm,
            "learning rate": rate(line),
            "seeds": line.seed_numbers.replace(" ", ", "),
            "parameters": shown(line.parameters),
            "training FLOPs": format_count(line.training_flops),
            "tokens": shown(line.tokens),
            "perplexity": perplexity(line.perplexity, line.perplexity_std),
            "loss": nats(line.loss, line.loss_std),
            "bits per byte": nats(line.bits_per_byte),
            "wall-clock seconds, whatever else the machine did": (
                shown(None) if line.seconds is None else f"{line.seconds:,.0f}"
            ),
        }
        for line in lines
    ]


def of_differences(pairs: Iterable[Difference]) -> Table:
    return [
        {
            "size": pair.size,
            "arm": pair.arm,
            "against": pair.against,
            "nats per token": difference(pair.difference, pair.interval),
            "seeds": shown(pair.seeds),
            "verdict": pair.verdict,
        }
        for pair in pairs
    ]


def of_best_rates(found: Iterable[BestRate]) -> Table:
    return [
        {
            "size": best.size,
            "arm": best.arm,
            "best learning rate": rate(best),
            "perplexity": perplexity(best.perplexity),
            "seeds": best.seed_numbers.replace(" ", ", "),
        }
        for best in found
    ]


def of_comparisons(found: Iterable[Comparison]) -> Table:
    """Tabulate arms at their best rates against the baseline, one comparison per column."""
    return [
        {
            "size": one.size,
            "arm": one.arm,
            "best learning rate": rate(one),
            "seeds": shown(one.seeds),
            "loss": nats(one.loss),
            "nats more than Llama of the size": estimated_difference(one.twin),
            "… of equal parameters": estimated_difference(one.equal_parameters),
            "… of equal training FLOPs": estimated_difference(one.equal_flops),
            "… of equal seconds, whatever else the machine did": (
                estimated_difference(one.equal_seconds)
            ),
            "compute multiplier": multiplier(one.compute_multiplier),
            "parameter multiplier": multiplier(one.parameter_multiplier),
        }
        for one in found
    ]


def of_powers(found: Iterable[Power]) -> Table:
    return [
        {
            "size": one.size,
            "standard deviation of a paired difference": f"{one.spread:.4f}",
            "degrees of freedom": shown(one.freedom),
            f"seeds that decide {WORTH_DECIDING} nats, four times of five": (
                "more than 1,000" if one.seeds is None else shown(one.seeds)
            ),
        }
        for one in found
    ]


def of_anything(lines: Iterable[Mapping[str, Any]]) -> Table:
    return [
        {name.replace("_", " "): shown(value) for name, value in line.items()} for line in lines
    ]

"""The tables of a report as its page has them: heading -> text, a line at a time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cem_jax.studies.figures import numbers
from cem_jax.text import format_count

Lines = Iterable[Mapping[str, Any]]


def of_points(lines: Lines) -> list[dict[str, str]]:
    """Of `results.Point.line`. Seconds depend on what else the machine did, and are so headed."""
    return [
        {
            "size": line["size"],
            "arm": line["arm"],
            "learning rate": numbers.rate(line["learning_rate"]),
            "seeds": line["seed_numbers"].replace(" ", ", "),
            "parameters": numbers.shown(line["parameters"]),
            "training FLOPs": format_count(line["training_flops"]),
            "tokens": numbers.shown(line["tokens"]),
            "perplexity": numbers.perplexity(line["perplexity"], line["perplexity_std"]),
            "loss": numbers.nats(line["loss"], line["loss_std"]),
            "bits per byte": _optional(line["bits_per_byte"], numbers.nats),
            "wall-clock seconds, whatever else the machine did": _optional(
                line["seconds"], lambda seconds: f"{seconds:,.0f}"
            ),
        }
        for line in lines
    ]


def of_differences(pairs: Lines) -> list[dict[str, str]]:
    """Of `differences.differences`."""
    return [
        {
            "size": pair["size"],
            "arm": pair["arm"],
            "against": pair["against"],
            "nats a token": numbers.difference(pair["difference"], pair["interval"]),
            "seeds": numbers.shown(pair["seeds"]),
            "verdict": pair["verdict"],
        }
        for pair in pairs
    ]


def of_best_rates(found: Lines) -> list[dict[str, str]]:
    """Of `results.best_rates`."""
    return [
        {
            "size": best["size"],
            "arm": best["arm"],
            "best learning rate": numbers.rate(best["learning_rate"]) + edge(best),
            "perplexity": numbers.perplexity(best["perplexity"]),
            "seeds": best["seed_numbers"].replace(" ", ", "),
        }
        for best in found
    ]


def of_anything(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [
        {name.replace("_", " "): numbers.shown(value) for name, value in line.items()}
        for line in lines
    ]


def edge(best: Mapping[str, Any]) -> str:
    return ", an end of the range" if best["at_edge"] else ""


def _optional(value: float | None, text) -> str:
    return numbers.ABSENT if value is None else text(value)

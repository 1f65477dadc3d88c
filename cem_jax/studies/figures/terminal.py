"""A report in the terminal: what is there and what is missing first, then a line an arm."""

from collections.abc import Iterator, Sequence

from cem_jax.studies.figures import numbers
from cem_jax.studies.figures.results import Point
from cem_jax.studies.figures.sections import Section
from cem_jax.studies.figures.tables import edge
from cem_jax.studies.figures.unmatched import Unplaced


def summary(sections: Sequence[Section], strays: Sequence[Unplaced]) -> Iterator[str]:
    """The lines. A baseline, which figures share, has one line, before them."""
    yield from _counts(sections)
    for group in strays:
        yield f"in no figure as asked for: {group}"
    begun = [section for section in sections if section.begun]
    baselines: dict[str, Point] = {}
    for section in begun:
        for point in section.present:
            if point.arm.name == section.sweep.baseline and point.rate == 1:
                baselines.setdefault(point.rows[0]["key"], point)
    for point in baselines.values():
        yield f"{point.size}, {point.arm.name}: {_measured(point)}"
    for section in begun:
        yield section.title
        yield from (f"  {line}" for line in [*_lines(section), *section.notes])


def _counts(sections: Sequence[Section]) -> Iterator[str]:
    ran = {row["run"] for section in sections for p in section.present for row in p.rows}
    lacking = {s.name: len(s.missing) for s in sections if s.missing}
    words = "".join(f"\n  {name}: {count}" for name, count in lacking.items())
    yield f"{len(ran)} runs in {sum(s.begun for s in sections)} figures; missing: " + (
        f"{sum(lacking.values())}{words}" if lacking else "none"
    )


def _lines(section: Section) -> Iterator[str]:
    if section.sweep.plot == "learning_rate":
        yield from _curves(section)
        return
    for point in section.others:
        yield f"{_named(section, point)}: {_measured(point)}{_compared(section, point)}"


def _curves(section: Section) -> Iterator[str]:
    """A line a curve: its optimum, and its points."""
    optima = {(best["size"], best["arm"]): best for best in section.best}
    for key, curve in section.curves.items():
        optimum = optima.get(key)
        told = (
            f"best {numbers.rate(optimum['learning_rate'])}{edge(optimum)}, perplexity "
            f"{numbers.perplexity(optimum['perplexity'])}, {_seeds(curve[0])}"
            if optimum
            else "no curve yet"
        )
        values = ", ".join(
            f"{numbers.rate(p.learning_rate)}: {numbers.perplexity(p.perplexity)}" for p in curve
        )
        yield f"{_named(section, curve[0])}: learning rate {told} ({values})"


def _named(section: Section, point: Point) -> str:
    several = len(section.sweep.arms) > 1
    return f"{point.size}, {point.arm.name}" if several else point.arm.name


def _measured(point: Point) -> str:
    deviation = point.line()["perplexity_std"]
    return f"perplexity {numbers.perplexity(point.perplexity, deviation)}, {_seeds(point)}"


def _seeds(point: Point) -> str:
    numbers_of_seeds = ", ".join(map(str, point.seeds))
    return f"{'seed' if len(point.seeds) == 1 else 'seeds'} {numbers_of_seeds}"


def _compared(section: Section, point: Point) -> str:
    return "".join(
        f"; {numbers.difference(pair['difference'], pair['interval'])} nats against "
        f"{pair['against']}, {pair['verdict']}"
        for pair in section.differences
        if (pair["size"], pair["arm"]) == (point.size, point.arm.name)
    )

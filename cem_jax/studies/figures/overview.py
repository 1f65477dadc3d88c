"""One picture of all arms of a size: more parameters are not the only cost.

Perplexity over training FLOPs and over parameters, error bars for one standard deviation over
seeds. The baseline is on top, with a dashed line. The panels are scaled to where most arms lie; the
few far above are at the upper edge, with an arrow and their perplexities.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cem_jax.studies.figures import numbers
from cem_jax.studies.figures.pictures import BASELINE_MARKER, LLAMA, PERPLEXITY, count_axis
from cem_jax.studies.figures.results import Point

MARKERS = "o^svPX>"  # seven, and ten colours: 70 arms before one looks as another
COSTS = {"training_flops": "training FLOPs", "parameters": "parameters"}


def arms_at(size: str, points: Sequence[Point]) -> list[Point]:
    """Each run once, with the seeds of the figure that has most, in descending perplexity."""
    unique: dict[str, Point] = {}
    for point in points:
        if point.rows and point.size == size:
            key = point.rows[0]["key"]
            unique[key] = max(unique.get(key, point), point, key=lambda p: len(p.rows))
    return sorted(unique.values(), key=lambda point: -point.perplexity)


def draw_overview(arms: Sequence[Point], baselines: set[str], picture: Path) -> None:
    """A PNG of `arms_at`; `baselines`: names of the arms that the others are measured by."""
    looks = [_look(index, arm, baselines) for index, arm in enumerate(arms)]
    top = _top(arms)
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(COSTS), sharey=True)
    for axes, (name, words) in zip(panels, COSTS.items(), strict=True):
        for arm, look in zip(arms, looks, strict=True):
            _dot(axes, arm.value(name), arm, look, top)
        count_axis(axes, words)
        axes.grid(alpha=0.3)
    if any(arm.perplexity > top for arm in arms):
        panels[0].set_ylim(top=top)
    panels[0].set_ylabel(PERPLEXITY)
    figure.suptitle(f"{arms[0].size}: all arms at the size's own learning rate")
    handles = [_handle(arm, look) for arm, look in zip(arms, looks, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(picture, dpi=110)


def _look(index: int, arm: Point, baselines: set[str]) -> dict:
    if arm.arm.name in baselines:
        hollow = {"mfc": "none", "mew": 2}  # another arm at the same place shows through
        return {"marker": BASELINE_MARKER, "color": LLAMA, "ms": 12, "zorder": 5, **hollow}
    marker = MARKERS[index % len(MARKERS)]
    return {"marker": marker, "color": f"C{index % 10}", "ms": 8, "mec": "white", "zorder": 3}


def _top(arms: Sequence[Point]) -> float:
    """The upper end of the axis: above all arms but those more than three times as far above the
    best as three quarters of the arms are, which would press the others into a line."""
    finite = [arm.perplexity for arm in arms if np.isfinite(arm.perplexity)]
    best, most = min(finite, default=1.0), float(np.quantile(finite or [1.0], 0.75))
    limit = best + 3 * max(most - best, 0.01 * best)
    ends = [arm.perplexity + arm.spread for arm in arms if arm.perplexity <= limit]
    return max(ends, default=limit) + 0.1 * (limit - best)


def _dot(axes: Axes, x: float, arm: Point, look: dict, top: float) -> None:
    if not arm.perplexity <= top:
        axes.plot(x, top, clip_on=False, ls="", **look)
        text, place = f"{numbers.perplexity(arm.perplexity)} ↑", {"textcoords": "offset points"}
        axes.annotate(text, (x, top), xytext=(0, -9), ha="center", va="top", fontsize=9, **place)
        return
    axes.errorbar(x, arm.perplexity, yerr=arm.spread or None, capsize=3, elinewidth=1, **look)
    if look["marker"] == BASELINE_MARKER:
        axes.axhline(arm.perplexity, color=LLAMA, ls="--", lw=1.2, zorder=1)


def _handle(arm: Point, look: dict) -> Line2D:
    spread = arm.spread if len(arm.rows) > 1 else None
    label = f"{arm.arm.name} ({arm.figure}): {numbers.perplexity(arm.perplexity, spread)}"
    return Line2D([], [], ls="", label=label, **look)

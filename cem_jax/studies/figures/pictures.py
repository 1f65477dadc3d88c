"""The pictures of a sweep: each figure's own, and one overview of all arms of a size.

A figure's picture shows test perplexity over the quantity in the paper's figure, and over FLOPs. A
colour is one series of arms in both panels. Markers distinguish sizes, or arms where sizes are far
apart anyway; where one pass is compared with two, hollow markers are one pass. Error bars are one
standard deviation over seeds.

The overview shows perplexity over training FLOPs and over parameters, since more parameters are not
the only cost. The baseline is on top, with a dashed line. The panels are scaled to where most arms
lie; the few far above are drawn at the upper edge, with an arrow and their perplexities.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from cem_jax.studies.figures import tables
from cem_jax.studies.figures.grid import Arm, Sweep
from cem_jax.studies.figures.results import Point, curves
from cem_jax.studies.figures.sections import Section
from cem_jax.text import format_count

LLAMA = "#e377a2"
COLOURS = ("#1f6fb4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf")
MARKERS = "o^svP*Xp"
ARM_MARKERS = "o^svPX>"  # seven, with ten colours: 70 arms before two look the same
BASELINE_MARKER = "D"
PERPLEXITY = "test perplexity"
COSTS = {"training_flops": "training FLOPs", "parameters": "parameters"}


def draw(section: Section, picture: Path) -> None:
    """Draw a PNG of the points that have rows; at least one must."""
    sweep, points, style = section.sweep, section.shown, _Style(section.sweep)
    # A learning rate changes no FLOPs: over them a curve would be a column of points.
    over_flops = sweep.plot != "learning_rate"
    figure = canvas(12 if over_flops else 7.5, 4.6)
    panels = figure.subplots(1, 1 + over_flops, squeeze=False)[0]
    _PLOTS[sweep.plot](panels[0], sweep, points, style)
    if over_flops:
        _over_flops(panels[1], points, style)
    for axes in panels:
        axes.set_ylabel(PERPLEXITY)
        axes.grid(alpha=0.3)
    figure.suptitle(section.title)
    handles = style.legend(points)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    figure.savefig(picture, dpi=110)


def canvas(width: float, height: float) -> Figure:
    """Return an empty picture, sized in inches; unlike pyplot, this needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _count_axis(axes: Axes, words: str) -> None:
    """Label an x axis of large numbers with a unit at each tick: 8.25T, 760k."""
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(words)


class _Style:
    """Colours of series, markers of sizes."""

    def __init__(self, sweep: Sweep):
        self.baseline = sweep.baseline
        self._by_arm = sweep.plot == "parameters"
        self._gain = sweep.plot == "gain"
        names = (self.series(arm) for arms in sweep.arms.values() for arm in arms)
        series = [name for name in dict.fromkeys(names) if name != sweep.baseline]
        pair = sweep.plot == "learning_rate" and len(series) == 1  # the paper's blue and orange
        self._base_colour = COLOURS[1] if pair else LLAMA
        self._colours = {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(series)}
        of = series if self._by_arm else sweep.arms
        self._markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(of)}

    def series(self, arm: Arm) -> str:
        """Return the series: the baseline's own, but in a gain the one whose first pass it is."""
        apart = arm.name == self.baseline and not self._gain
        return self.baseline if apart else arm.series or arm.name

    def colour(self, point: Point) -> str:
        return self._colours.get(self.series(point.arm), self._base_colour)

    def marker(self, point: Point) -> str:
        if self._by_arm:
            return self._markers.get(self.series(point.arm), BASELINE_MARKER)
        return self._markers[point.size]

    def dots(self, axes: Axes, x: float, point: Point) -> None:
        axes.errorbar(
            x,
            point.perplexity,
            yerr=point.deviation or None,
            fmt=self.marker(point),
            color=self.colour(point),
            mfc="white" if self._gain and point.arm.x == 1 else None,
            capsize=3,
            markersize=7,
        )

    def legend(self, points: Sequence[Point]) -> list[Line2D]:
        series = {self.series(p.arm): p for p in points}
        look = lambda p: {"ls": "", "marker": self.marker(p)} if self._by_arm else {"lw": 3}
        handles = [
            Line2D([], [], color=self.colour(p), label=self._label(name, points), **look(p))
            for name, p in series.items()
        ]
        mark = lambda **look: Line2D([], [], ls="", color="0.3", **look)
        if self._gain:
            handles += [
                mark(marker="o", mfc="white", label="T = 1"),
                mark(marker="o", label="T = 2"),
            ]
        sizes = {} if self._by_arm else {p.size: self.marker(p) for p in points}
        if len(sizes) > 1:
            handles += [mark(marker=marker, label=size) for size, marker in sizes.items()]
        return handles

    def _label(self, series: str, points: Sequence[Point]) -> str:
        of = {self.series(p.arm) for p in points if p.arm.name == self.baseline}
        return f"{series} (T = 1: {self.baseline})" if self._gain and series in of else series


def _split(points: Sequence[Point], sweep: Sweep) -> tuple[dict[str, Point], list[Point]]:
    """Return (baseline by size, the others)."""
    base = {p.size: p for p in points if p.arm.name == sweep.baseline and p.rate == 1}
    return base, [p for p in points if p.arm.name != sweep.baseline]


def _baselines(axes: Axes, base: dict[str, Point]) -> None:
    for point in base.values():
        axes.axhline(point.perplexity, color=LLAMA, ls="--", lw=1.2)


def _over_parameters(axes: Axes, sweep: Sweep, points: Sequence[Point], style: _Style) -> None:
    base, others = _split(points, sweep)
    for point in others:
        if point.size in base:
            twin = base[point.size]
            ends = [twin.parameters, point.parameters]
            axes.plot(ends, [twin.perplexity, point.perplexity], color="0.8", lw=1, zorder=0)
    for point in points:
        style.dots(axes, point.parameters, point)
    for point in base.values():  # at the bottom of the panel, where no error bar reaches
        axes.text(
            point.parameters,
            0.02,
            f"{format_count(point.tokens)} tokens",
            transform=axes.get_xaxis_transform(),
            ha="center",
            fontsize=8,
        )
    axes.margins(x=0.12, y=0.16)
    _count_axis(axes, "parameters")


def _over_steps(axes: Axes, sweep: Sweep, points: Sequence[Point], style: _Style) -> None:
    base, others = _split(points, sweep)
    _baselines(axes, base)
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in others:
        style.dots(axes, point.arm.x, point)
        lines.setdefault((point.size, point.arm.series), []).append(point)
    for line in lines.values():
        line.sort(key=lambda p: p.arm.x)
        at = [p.arm.x for p in line]
        axes.plot(at, [p.perplexity for p in line], color=style.colour(line[0]), lw=1)
    axes.set_xticks(sorted({p.arm.x for p in others}))
    axes.set_xlabel("steps of recursion T")


def _over_rates(axes: Axes, sweep: Sweep, points: Sequence[Point], style: _Style) -> None:
    for curve in curves(points):
        for point in curve.points:
            style.dots(axes, point.learning_rate, point)
        if curve.best:
            colour, best = style.colour(curve.points[0]), curve.best
            axes.plot(*curve.line, color=colour, lw=1)
            axes.plot(best.learning_rate, best.perplexity, "*", color=colour, ms=16, mec="black")
    axes.set_xscale("log")
    ticks = sorted({p.learning_rate for p in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("learning rate")


def _over_arms(axes: Axes, sweep: Sweep, points: Sequence[Point], style: _Style) -> None:
    base, others = _split(points, sweep)
    _baselines(axes, base)
    names = list(dict.fromkeys(p.arm.name for p in others))
    for point in others:
        style.dots(axes, names.index(point.arm.name), point)
    turned = {"rotation": 20, "ha": "right"} if len(names) > 4 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    axes.margins(x=0.15)


def _gains(axes: Axes, sweep: Sweep, points: Sequence[Point], style: _Style) -> None:
    """Draw one column per series: each size from T = 1, hollow, to T = 2."""
    series = list(dict.fromkeys(p.arm.series for p in points))
    sizes = list(dict.fromkeys(p.size for p in points))
    for index in range(0, len(series), 2):
        axes.axvspan(index - 0.5, index + 0.5, color="0.95", zorder=-2)
    pairs: dict[tuple[str, str], dict[int, Point]] = {}
    for point in points:
        pairs.setdefault((point.arm.series, point.size), {})[point.arm.x] = point
    for (name, size), pair in pairs.items():
        x = series.index(name) + 0.7 * ((sizes.index(size) + 0.5) / len(sizes) - 0.5)
        for point in pair.values():
            style.dots(axes, x, point)
        if len(pair) == 2:
            ends = [pair[steps].perplexity for steps in (1, 2)]
            axes.annotate("", (x, ends[1]), (x, ends[0]), arrowprops={"arrowstyle": "->"})
    axes.set_xlim(-0.5, len(series) - 0.5)
    axes.set_xticks(range(len(series)), series)


def _over_test_steps(axes: Axes, sweep: Sweep, points: Sequence[Point], style: _Style) -> None:
    base, others = _split(points, sweep)
    _baselines(axes, base)
    for point in others:
        for row in point.rows:
            steps = sorted(map(int, row.loss_at_steps))
            values = np.exp([row.loss_at_steps[str(t)] for t in steps])
            axes.plot(steps, values, f"{style.marker(point)}-", color=style.colour(point), lw=1)
    axes.set_xlabel("steps of recursion T at evaluation")


def _over_flops(axes: Axes, points: Sequence[Point], style: _Style) -> None:
    for point in points:
        style.dots(axes, point.training_flops, point)
    _count_axis(axes, "training FLOPs")


_PLOTS: dict[str, Callable[[Axes, Sweep, Sequence[Point], _Style], None]] = {
    "parameters": _over_parameters,
    "steps": _over_steps,
    "learning_rate": _over_rates,
    "arms": _over_arms,
    "gain": _gains,
    "test_steps": _over_test_steps,
}


def arms_at(size: str, points: Sequence[Point]) -> list[Point]:
    """Return each run of the size once, with the seeds of the figure that has most; worst first."""
    unique: dict[str, Point] = {}
    for point in points:
        if point.rows and point.size == size:
            key = point.rows[0].key
            unique[key] = max(unique.get(key, point), point, key=lambda p: len(p.rows))
    return sorted(unique.values(), key=lambda point: -point.perplexity)


def draw_overview(arms: Sequence[Point], baselines: set[str], picture: Path) -> None:
    """Draw a PNG of `arms_at`; `baselines`: names of the arms that others are compared with."""
    looks = [_look(index, arm, baselines) for index, arm in enumerate(arms)]
    top = _top(arms)
    figure = canvas(12, 7.5)
    panels = figure.subplots(1, len(COSTS), sharey=True)
    for axes, (name, words) in zip(panels, COSTS.items(), strict=True):
        for arm, look in zip(arms, looks, strict=True):
            _dot(axes, getattr(arm, name), arm, look, top)
        _count_axis(axes, words)
        axes.grid(alpha=0.3)
    if any(arm.perplexity > top for arm in arms):
        panels[0].set_ylim(top=top)
    panels[0].set_ylabel(PERPLEXITY)
    figure.suptitle(f"{arms[0].size}: all arms at the size's own learning rate")
    handles = [_handle(arm, look) for arm, look in zip(arms, looks, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(picture, dpi=110)


def _look(index: int, arm: Point, baselines: set[str]) -> dict[str, Any]:
    if arm.arm.name in baselines:
        hollow = {"mfc": "none", "mew": 2}  # another arm at the same place shows through
        return {"marker": BASELINE_MARKER, "color": LLAMA, "ms": 12, "zorder": 5, **hollow}
    marker = ARM_MARKERS[index % len(ARM_MARKERS)]
    return {"marker": marker, "color": f"C{index % 10}", "ms": 8, "mec": "white", "zorder": 3}


def _top(arms: Sequence[Point]) -> float:
    """Return the upper end of the axis.

    It leaves out arms more than three times as far above the best as three quarters of the arms
    are, since they would press the others into a line.
    """
    finite = [arm.perplexity for arm in arms if np.isfinite(arm.perplexity)]
    best, most = min(finite, default=1.0), float(np.quantile(finite or [1.0], 0.75))
    limit = best + 3 * max(most - best, 0.01 * best)
    ends = [arm.perplexity + (arm.deviation or 0.0) for arm in arms if arm.perplexity <= limit]
    return max(ends, default=limit) + 0.1 * (limit - best)


def _dot(axes: Axes, x: float, arm: Point, look: dict[str, Any], top: float) -> None:
    if not arm.perplexity <= top:
        axes.plot(x, top, clip_on=False, ls="", **look)
        text, place = f"{tables.perplexity(arm.perplexity)} ↑", {"textcoords": "offset points"}
        axes.annotate(text, (x, top), xytext=(0, -9), ha="center", va="top", fontsize=9, **place)
        return
    axes.errorbar(x, arm.perplexity, yerr=arm.deviation or None, capsize=3, elinewidth=1, **look)
    if look["marker"] == BASELINE_MARKER:
        axes.axhline(arm.perplexity, color=LLAMA, ls="--", lw=1.2, zorder=1)


def _handle(arm: Point, look: dict[str, Any]) -> Line2D:
    perplexity = tables.perplexity(arm.perplexity, arm.deviation)
    label = f"{arm.arm.name} ({arm.figure}): {perplexity}"
    return Line2D([], [], ls="", label=label, **look)

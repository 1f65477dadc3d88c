"""The pictures of a sweep: test perplexity over what the paper's figure has, and over FLOPs.

A colour is one series of arms in both panels. Markers stand for sizes, or for arms where sizes lie
apart by themselves; hollow ones, where one pass is compared with two, for one; error bars for one
standard deviation over seeds.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from cem_jax.studies.figures.grid import Arm, Sweep
from cem_jax.studies.figures.results import Point, curves, interpolated
from cem_jax.studies.figures.sections import Section
from cem_jax.text import format_count

LLAMA = "#e377a2"
COLOURS = ("#1f6fb4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf")
MARKERS = "o^svP*Xp"
BASELINE_MARKER = "D"
PERPLEXITY = "test perplexity"


def draw(section: Section, picture: Path) -> None:
    """A PNG of the points that have rows; there must be one."""
    sweep, points, style = section.sweep, section.shown, _Style(section.sweep)
    # A learning rate changes no FLOPs: over them a curve would be a column of points.
    over_flops = sweep.plot != "learning_rate"
    figure = Figure(figsize=(12 if over_flops else 7.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)  # pyplot would look for a display
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


def count_axis(axes: Axes, words: str) -> None:
    """An x axis of large numbers, each tick with its unit: 8.25T, 760k."""
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(words)


class _Style:
    """Colours of series, markers of sizes."""

    def __init__(self, sweep: Sweep):
        self.baseline = sweep.baseline
        self._base_colour = COLOURS[1] if sweep.plot == "learning_rate" else LLAMA
        self._by_arm = sweep.plot == "parameters"
        self._gain = sweep.plot == "gain"
        names = (self.series(arm) for arms in sweep.arms.values() for arm in arms)
        series = [name for name in dict.fromkeys(names) if name != sweep.baseline]
        self._colours = {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(series)}
        of = series if self._by_arm else sweep.arms
        self._markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(of)}

    def series(self, arm: Arm) -> str:
        """The baseline is one by itself, but the first pass of its own series in a gain."""
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
            yerr=point.spread or None,
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
    """(baseline by size, the others)."""
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
            ends = [twin.value("parameters"), point.value("parameters")]
            axes.plot(ends, [twin.perplexity, point.perplexity], color="0.8", lw=1, zorder=0)
    for point in points:
        style.dots(axes, point.value("parameters"), point)
    for point in base.values():  # at the foot of the panel, where no error bar reaches
        axes.text(
            point.value("parameters"),
            0.02,
            f"{format_count(point.value('tokens'))} tokens",
            transform=axes.get_xaxis_transform(),
            ha="center",
            fontsize=8,
        )
    axes.margins(x=0.12, y=0.16)
    count_axis(axes, "parameters")


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
    for curve in curves(points).values():
        for point in curve:
            style.dots(axes, point.learning_rate, point)
        line = interpolated(curve)
        if line is not None:
            rates, perplexities = line
            colour = style.colour(curve[0])
            axes.plot(rates, perplexities, color=colour, lw=1)
            best = perplexities.argmin()
            axes.plot(rates[best], perplexities[best], "*", color=colour, ms=16, mec="black")
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
    """A column a series: each size from T = 1, hollow, to T = 2."""
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
    import numpy as np

    base, others = _split(points, sweep)
    _baselines(axes, base)
    for point in others:
        for row in point.rows:
            steps = sorted(map(int, row["loss_at_steps"]))
            values = np.exp([row["loss_at_steps"][str(t)] for t in steps])
            axes.plot(steps, values, f"{style.marker(point)}-", color=style.colour(point), lw=1)
    axes.set_xlabel("steps of recursion T at evaluation")


def _over_flops(axes: Axes, points: Sequence[Point], style: _Style) -> None:
    for point in points:
        style.dots(axes, point.value("training_flops"), point)
    count_axis(axes, "training FLOPs")


_PLOTS: dict[str, Callable[[Axes, Sweep, Sequence[Point], _Style], None]] = {
    "parameters": _over_parameters,
    "steps": _over_steps,
    "learning_rate": _over_rates,
    "arms": _over_arms,
    "gain": _gains,
    "test_steps": _over_test_steps,
}

"""The pictures of a sweep: test perplexity over what the paper's figure has, and over FLOPs.

Colours are the paper's where it has them. Markers stand for sizes, or for arms where sizes lie
apart by themselves; error bars for one standard deviation over seeds.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cem_jax.experiments.grid import Sweep
from cem_jax.experiments.results import Point, curves, interpolate
from cem_jax.train.progress import format_count

LLAMA = "#e377a2"
COLOURS = ("#1f6fb4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf")
MARKERS = "o^svP*Xp"
BASELINE_MARKER = "D"
PERPLEXITY = "test perplexity"


def draw(sweep: Sweep, points: Sequence[Point], picture: Path) -> None:
    """A PNG of the points that have rows; there must be one."""
    points = [point for point in points if point.rows]
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)  # pyplot would look for a display
    left, right = figure.subplots(1, 2)
    style = _Style(sweep)
    _PLOTS[sweep.plot](left, sweep, points, style)
    _over_flops(right, sweep, points, style)
    figure.suptitle(f"{sweep.name}: {sweep.title}")
    handles = style.legend(points)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    figure.savefig(picture, dpi=110)


def draw_all_over_flops(points: Sequence[Point], size: str, picture: Path) -> None:
    """Every arm of one size, of all figures: perplexity over training FLOPs and over parameters."""
    unique: dict[str, Point] = {}
    for point in points:
        if point.rows and point.size == size:
            unique.setdefault(point.rows[0]["key"], point)
    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    names = ("training_flops", "parameters")
    for axes, name, words in zip(panels, names, ("training FLOPs", "parameters"), strict=True):
        for index, point in enumerate(unique.values()):
            marker = MARKERS[index // 10 % len(MARKERS)]
            label = f"{point.arm.name} ({point.figure})"
            colour = f"C{index % 10}"
            axes.plot(point.value(name), point.perplexity, marker, color=colour, label=label)
        axes.set_xlabel(words)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(PERPLEXITY)
    figure.suptitle(f"{size}: all arms at the size's own learning rate")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(picture, dpi=110)


class _Style:
    """Colours of series, markers of sizes."""

    def __init__(self, sweep: Sweep):
        self.baseline = sweep.baseline
        self._base_colour = COLOURS[1] if sweep.plot == "learning_rate" else LLAMA
        self._by_arm = sweep.plot == "parameters"
        names = (self.series(arm) for arms in sweep.arms.values() for arm in arms)
        series = [name for name in dict.fromkeys(names) if name != sweep.baseline]
        self._colours = {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(series)}
        of = series if self._by_arm else sweep.arms
        self._markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(of)}

    def series(self, arm) -> str:
        return self.baseline if arm.name == self.baseline else arm.series or arm.name

    def colour(self, point: Point) -> str:
        return self._colours.get(self.series(point.arm), self._base_colour)

    def marker(self, point: Point) -> str:
        if self._by_arm:
            return self._markers.get(self.series(point.arm), BASELINE_MARKER)
        return self._markers[point.size]

    def dots(self, axes: Axes, x: float, point: Point, colour: str | None = None) -> None:
        axes.errorbar(
            x,
            point.perplexity,
            yerr=point.spread or None,
            fmt=self.marker(point),
            color=colour or self.colour(point),
            capsize=3,
            markersize=7,
        )

    def legend(self, points: Sequence[Point]) -> list[Line2D]:
        series = {self.series(p.arm): p for p in points}
        look = lambda p: {"ls": "", "marker": self.marker(p)} if self._by_arm else {"lw": 3}
        handles = [
            Line2D([], [], color=self.colour(p), label=name, **look(p))
            for name, p in series.items()
        ]
        sizes = {} if self._by_arm else {p.size: self.marker(p) for p in points}
        if len(sizes) > 1:
            handles += [
                Line2D([], [], ls="", marker=m, color="0.3", label=s) for s, m in sizes.items()
            ]
        return handles


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
    for point in base.values():
        axes.annotate(
            f"{format_count(point.value('tokens'))} tokens",
            (point.value("parameters"), point.perplexity),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.margins(x=0.12, y=0.12)
    axes.set_xlabel("parameters")


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
        if len(curve) >= 3:
            rates, perplexities = interpolate(
                [p.learning_rate for p in curve], [p.perplexity for p in curve]
            )
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
    axes.set_xticks(range(len(names)), names)
    axes.margins(x=0.15)


def _gains(axes: Axes, sweep: Sweep, points: Sequence[Point], style: _Style) -> None:
    """A shaded area a series: each size from T = 1, orange, to T = 2, blue."""
    series = list(dict.fromkeys(p.arm.series for p in points))
    sizes = list(dict.fromkeys(p.size for p in points))
    colours = {1: COLOURS[1], 2: COLOURS[0]}
    shades = ("#ffe8cc", "#dbe9f6", "#fbe3ec")
    for index in range(len(series)):
        axes.axvspan(index - 0.5, index + 0.5, color=shades[index % 3], zorder=-2)
    pairs: dict[tuple[str, str], dict[int, Point]] = {}
    for point in points:
        pairs.setdefault((point.arm.series, point.size), {})[point.arm.x] = point
    for (name, size), pair in pairs.items():
        x = series.index(name) + 0.7 * ((sizes.index(size) + 0.5) / len(sizes) - 0.5)
        for steps, point in pair.items():
            style.dots(axes, x, point, colours[steps])
        if len(pair) == 2:
            ends = [pair[steps].perplexity for steps in (1, 2)]
            axes.annotate("", (x, ends[1]), (x, ends[0]), arrowprops={"arrowstyle": "->"})
    handles = [
        Line2D([], [], ls="", marker="o", color=colours[t], label=f"T = {t}") for t in colours
    ]
    axes.legend(handles=handles)
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


def _over_flops(axes: Axes, sweep: Sweep, points: Sequence[Point], style: _Style) -> None:
    for point in points:
        style.dots(axes, point.value("training_flops"), point)
    axes.set_xlabel("training FLOPs")
    for each in (axes, axes.figure.axes[0]):
        each.set_ylabel(PERPLEXITY)
        each.grid(alpha=0.3)


_PLOTS: dict[str, Callable[[Axes, Sweep, Sequence[Point], _Style], None]] = {
    "parameters": _over_parameters,
    "steps": _over_steps,
    "learning_rate": _over_rates,
    "arms": _over_arms,
    "gain": _gains,
    "test_steps": _over_test_steps,
}

"""The picture of a figure's arms over model sizes: loss over FLOPs, and what an arm is worth.

The first panel shows Llama's fitted curve, the others each arm's compute and parameter multipliers
with their intervals; above 1 the arm is worth more than it costs. What lies beyond the sizes that
ran is dashed: Llama's curve, and the straight line through an arm's multipliers.
"""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, NullFormatter, ScalarFormatter

from cem_jax.studies.figures.pictures import BASELINE_MARKER, LLAMA, MARKERS, canvas
from cem_jax.studies.figures.scaling import Estimate, Scaling

BEYOND = 10  # the dashed lines extend to this multiple of the largest size's cost


def draw_scaling(found: Scaling, picture: Path) -> None:
    """Draw the picture as a PNG; Llama must have its curve over FLOPs."""
    arms = list(dict.fromkeys(best.arm for best in found.others))
    looks = {
        arm: {"color": f"C{index % 10}", "marker": MARKERS[index % len(MARKERS)]}
        for index, arm in enumerate(arms)
    }
    figure = canvas(16, 5.2)
    losses, *panels = figure.subplots(1, 3)
    _losses(losses, found, looks)
    for axes, name in zip(panels, ("compute", "parameter"), strict=True):
        _multipliers(axes, found, f"{name}_multiplier", looks)
        axes.set_title(f"{name} multiplier")
    handles = [Line2D([], [], color=LLAMA, marker=BASELINE_MARKER, label=found.llama[0].arm)]
    handles += [Line2D([], [], ls="", label=arm, **look) for arm, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    figure.savefig(picture, dpi=110)


def _losses(axes: Axes, found: Scaling, looks: dict[str, dict[str, str]]) -> None:
    law = found.laws["training_flops"]
    ends = [best.training_flops for best in found.llama]
    for low, high, style in ((ends[0], ends[-1], "-"), (ends[-1], BEYOND * ends[-1], "--")):
        flops = np.geomspace(low, high, 100)
        axes.plot(flops, [law.loss(c)[0] for c in flops], color=LLAMA, ls=style, lw=1.2)
    hollow = {"mfc": "none", "ms": 10, "ls": ""}
    axes.plot(ends, [b.loss for b in found.llama], BASELINE_MARKER, color=LLAMA, **hollow)
    for best in found.others:
        axes.plot(best.training_flops, best.loss, ls="", **looks[best.arm])
    axes.set_xscale("log")
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("test loss in nats, at the best learning rate")
    axes.grid(alpha=0.3)


def _multipliers(axes: Axes, found: Scaling, name: str, looks: dict[str, dict[str, str]]) -> None:
    sizes = {best.size: best.parameters for best in found.llama}
    axes.axhline(1, color=LLAMA, lw=1.2)
    for index, (arm, look) in enumerate(looks.items()):
        shift = 1 + 0.02 * (index - (len(looks) - 1) / 2)  # so that intervals are side by side
        known = [(sizes[c.size], getattr(c, name)) for c in found.of(arm)]
        known = [(at, e) for at, e in known if e and math.isfinite(e.value) and e.value > 0]
        for at, estimate in known:
            low, high = _reach(estimate)
            axes.errorbar(at * shift, estimate.value, yerr=[[low], [high]], capsize=3, **look)
        if len(known) > 1:
            at, values = np.array([(at, estimate.value) for at, estimate in known]).T
            axes.plot(at * shift, values, color=look["color"], lw=1)
            line = np.poly1d(np.polyfit(np.log(at), np.log(values), 1))
            ends = np.array([at[-1], BEYOND * at[-1]])
            axes.plot(ends, np.exp(line(np.log(ends))), color=look["color"], ls="--", lw=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("Llama's parameters at the size")
    for place, formatter in (("major", ScalarFormatter()), ("minor", ScalarFormatter())):
        getattr(axes.yaxis, f"set_{place}_formatter")(formatter)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both", axis="y")


def _reach(estimate: Estimate) -> tuple[float, float]:
    """Return how far the interval reaches below and above; 0 without one, or to infinity."""
    if estimate.low is None or not math.isfinite(estimate.high):
        return 0.0, 0.0
    return max(estimate.value - estimate.low, 0.0), max(estimate.high - estimate.value, 0.0)

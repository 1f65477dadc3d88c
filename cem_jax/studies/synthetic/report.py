"""The results of the synthetic study as a table and as a plot."""

from pathlib import Path
from typing import Any

import numpy as np

from cem_jax.studies.synthetic.data import KERNELS
from cem_jax.studies.synthetic.models import MODELS, POINTS
from cem_jax.text import aligned, format_count

_FLOPS = f"FLOPs, forward, {POINTS} points"
_HEADER = ("Kernel", "Model", "Parameters", _FLOPS, "Train RMSE", "Test RMSE")


def rendered(models: dict[str, dict[str, int]], kernels: dict[str, dict[str, Any]]) -> str:
    """Return Table 3 as text: one line per kernel and model, the best of each kernel starred."""
    rows = [_HEADER]
    for kernel, results in kernels.items():
        means = {
            split: {name: np.mean(r[split]) for name, r in results["models"].items()}
            for split in ("train", "test")
        }
        for name, errors in results["models"].items():
            cells = [
                spread(errors[split])
                + ("*" if name == min(means[split], key=means[split].get) else "")
                for split in ("train", "test")
            ]
            rows.append((KERNELS[kernel].title, *_size(models, name), *cells))
    if not kernels:
        rows = [_HEADER[1:4], *(_size(models, name) for name in models)]
    return aligned(rows, "<" * len(rows[0]))


def spread(values: list[float]) -> str:
    """Return the mean ± standard deviation over the seeds as text."""
    mean = f"{np.mean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {_deviation(values):.4f}"


def _deviation(values: list[float]) -> float:
    """Return the sample standard deviation; 0 for a single value."""
    return 0.0 if len(values) == 1 else float(np.std(values, ddof=1))


def _size(models, name: str) -> tuple[str, str, str]:
    count, flops = models[name]["parameters"], models[name]["flops"]
    return MODELS[name].title, f"{count:,}", format_count(flops)


def draw(kernels: dict[str, dict[str, Any]], picture: Path) -> None:
    """Plot RMSE against T to a PNG, one panel per kernel: mean and deviation over the seeds."""
    from cem_jax.studies.figures.pictures import canvas  # matplotlib: not for --dry-run

    figure = canvas(3.2 * len(kernels), 3.4)
    panels = figure.subplots(1, len(kernels), squeeze=False)[0]
    cem = {name: model.steps for name, model in MODELS.items() if model.kind == "cem"}
    for panel, (kernel, results) in zip(panels, kernels.items(), strict=True):
        errors = results["models"]
        for split, style in (("test", "o-"), ("train", "o:")):
            means = [np.mean(errors[name][split]) for name in cem]
            stds = [_deviation(errors[name][split]) for name in cem]
            panel.errorbar(
                list(cem.values()),
                means,
                stds,
                fmt=style,
                color="C0",
                capsize=3,
                label=f"CEM, {split}",
            )
        for name, color in (("gated", "C1"), ("plain", "0.6")):
            level = np.mean(errors[name]["test"])
            panel.axhline(level, color=color, ls="--", label=f"{MODELS[name].title}, test")
        panel.set_title(KERNELS[kernel].title)
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(cem.values()), [str(steps) for steps in cem.values()])
        panel.set_xlabel("steps of recursion, T")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("RMSE")
    panels[0].legend(fontsize="small")
    figure.savefig(picture, dpi=120)

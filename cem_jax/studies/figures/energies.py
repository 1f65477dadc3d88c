"""Pictures of how a run's layers descended, from the `energies` lines of its metrics.

Heat maps of each quantity over layer and step t, at the last such line; and the energy over t, one
curve per layer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cem_jax.runs.metrics import FILE_NAME, read_metrics
from cem_jax.storage.paths import AnyPath, entries
from cem_jax.studies.figures.pictures import canvas

# Fields of a line that are lists over layer and t, with their labels in a picture.
QUANTITIES = {
    "energy_change": "ΔE",
    "rise_fraction": "share of tokens whose energy rose",
    "descent_ratio": "ΔE over its first order",
    "force_norm": "norm of the force",
    "cosine": "cosine of successive updates",
    "entropy": "entropy of attention, nats",
    "self_mass": "attention to itself",
}
SUBLAYERS = ("attention", "mlp")


def energy_lines(workdir: AnyPath) -> dict[str, list[dict[str, Any]]]:
    """Return the `energies` lines of `workdir` and of each run in its folders, by run name."""
    folders = [workdir, *(path for path in entries(workdir) if path.is_dir())]
    found = {}
    for folder in folders:
        if (folder / FILE_NAME).exists():
            lines = [line for line in read_metrics(folder) if line["kind"] == "energies"]
            if lines:
                found[folder.name] = lines
    return found


def draw_energies(name: str, lines: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw a PNG with a row per CEM sublayer: its energy over t, then its heat maps."""
    last = lines[-1]
    sublayers = [sublayer for sublayer in SUBLAYERS if sublayer in last]
    shown = [q for q in QUANTITIES if any(_filled(last[s].get(q)) for s in sublayers)]
    figure = canvas(3.4 * (1 + len(shown)), 3.2 * len(sublayers))
    rows = figure.subplots(len(sublayers), 1 + len(shown), squeeze=False)
    for axes, sublayer in zip(rows, sublayers, strict=True):
        _energy_over_steps(axes[0], sublayer, last[sublayer])
        for panel, quantity in zip(axes[1:], shown, strict=True):
            _heat_map(panel, last[sublayer].get(quantity), QUANTITIES[quantity])
    figure.suptitle(f"{name}, step {last['step']}")
    figure.savefig(picture, dpi=100)


def eigenvalue_table(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return {sublayer, layer, smallest, largest}: eigenvalues per preconditioner, last line."""
    last = lines[-1]
    return [
        {"sublayer": sublayer, "layer": layer, "smallest": smallest, "largest": largest}
        for sublayer in SUBLAYERS
        if "smallest_eigenvalue" in last.get(sublayer, {})
        for layer, (smallest, largest) in enumerate(
            zip(
                last[sublayer]["smallest_eigenvalue"],
                last[sublayer]["largest_eigenvalue"],
                strict=True,
            )
        )
    ]


def _filled(values: Sequence[Sequence[float]] | None) -> bool:
    return bool(values) and any(len(row) for row in values)


def _energy_over_steps(axes, sublayer: str, values: Mapping[str, Any]) -> None:
    energy_LT = np.array(values["energy"], float)  # null: not finite
    for layer, energy_T in enumerate(energy_LT):
        change_T = energy_T - energy_T[0]
        axes.plot(range(len(change_T)), change_T, "o-", ms=4, label=f"layer {layer}")
    axes.set_title(f"{sublayer}: mean energy since t = 0", fontsize=9)
    axes.set_xlabel("t")
    axes.set_xticks(range(energy_LT.shape[1]))
    axes.grid(alpha=0.3)
    if len(energy_LT) <= 12:
        axes.legend(fontsize=7)


def _heat_map(axes, values: Sequence[Sequence[float]] | None, title: str) -> None:
    if not _filled(values):
        axes.set_axis_off()
        return
    value_LT = np.array(values, float)
    image = axes.imshow(value_LT, aspect="auto", cmap="viridis", origin="lower")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("t")
    axes.set_ylabel("layer")
    axes.set_xticks(range(value_LT.shape[1]))
    axes.set_yticks(range(0, value_LT.shape[0], max(1, value_LT.shape[0] // 8)))
    axes.figure.colorbar(image, ax=axes, format="%.4g")

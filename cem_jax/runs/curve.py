"""Draw the loss curve of a run."""

from pathlib import Path
from typing import Any

from cem_jax.runs.metrics import read_metrics


def draw_loss_curve(workdir: Path, picture: Path) -> None:
    """Write a PNG of training and held-out loss over tokens, with the learning rate below.

    Held-out losses are all on the same tokens; evaluations of other parts are left out.
    """
    # pyplot would look for a display; a standalone figure does not.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(workdir)
    train = [line for line in lines if line["kind"] == "train" and line["loss"] is not None]
    tokens_at = {line["step"]: line["tokens"] for line in train}
    held_out = _comparable([line for line in lines if line["kind"] == "eval"])
    held_out = [line for line in held_out if line["step"] in tokens_at]
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    millions = [line["tokens"] / 1e6 for line in train]
    top.plot(millions, [line["loss"] for line in train], color="0.75", lw=1, label="training")
    top.plot(
        millions,
        _smoothed([line["loss"] for line in train]),
        color="C0",
        lw=2,
        label="training, smoothed",
    )
    if held_out:
        at = [tokens_at[line["step"]] / 1e6 for line in held_out]
        losses = [line["loss"] for line in held_out]
        label = f"held out, the same {held_out[0]['tokens']:,} tokens each time"
        top.plot(at, losses, "o-", color="C1", markersize=8, label=label)
    top.set_ylabel("loss, nats per token")
    top.legend()
    top.grid(alpha=0.3)
    bottom.plot(millions, [line["learning_rate"] for line in train], color="C2")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("million tokens")
    bottom.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def _comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the evaluations of one part of the split: the most frequent, of equals the latest."""
    sizes = [line["tokens"] for line in lines]
    often = max(reversed(sizes), key=sizes.count, default=0)
    return [line for line in lines if line["tokens"] == often]


def _smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    smooth, level, norm = [], 0.0, 0.0
    for value in values:
        level = weight * level + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smooth.append(level / norm)
    return smooth

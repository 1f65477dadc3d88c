"""The loss curve of a run, as a picture."""

from pathlib import Path

from cem_jax.train.metrics import read_metrics


def draw_loss_curve(workdir: Path, picture: Path) -> None:
    """Training and validation loss over tokens, and the learning rate below, as a PNG."""
    # The pyplot interface would look for a display; figures of their own do not.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(workdir)
    train = [line for line in lines if line["kind"] == "train" and line["loss"] is not None]
    tokens_at = {line["step"]: line["tokens"] for line in train}
    validation = [line for line in lines if line["kind"] == "eval" and line["step"] in tokens_at]
    most = max((line["tokens"] for line in validation), default=0)
    part = [line for line in validation if line["tokens"] < most]
    whole = [line for line in validation if line["tokens"] == most]
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    millions = [line["tokens"] / 1e6 for line in train]
    top.plot(millions, [line["loss"] for line in train], color="0.75", lw=1, label="training")
    top.plot(
        millions, _smoothed([line["loss"] for line in train]), color="C0", lw=2, label="smoothed"
    )
    # a part of the split and the whole of it are not to be compared, so they are not joined
    for points, style, label in ((part, "o-", "held-out, a part"), (whole, "*-", "held-out")):
        if points:
            at = [tokens_at[line["step"]] / 1e6 for line in points]
            losses = [line["loss"] for line in points]
            top.plot(at, losses, style, color="C1", markersize=8, label=label)
    top.set_ylabel("loss, nats a token")
    top.legend()
    top.grid(alpha=0.3)
    bottom.plot(millions, [line["learning_rate"] for line in train], color="C2")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("million tokens")
    bottom.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def _smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    smooth, level, norm = [], 0.0, 0.0
    for value in values:
        level = weight * level + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smooth.append(level / norm)
    return smooth

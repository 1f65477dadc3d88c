"""What may differ between a run and its continuation, and by which rule the run then goes on.

A run whose batch, context or schedule changed goes on with its parameters, its optimizer state and
its step. With train.steps, it ends at that step, and the learning rate is the new schedule's at the
step it is at. With train.tokens, it ends at the step nearest to so many tokens, and the learning
rate is the new schedule's at the share of them that were seen. The data go on at the first
window that was not consumed; windows of another length as many tokens into their order.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from etils import epath

from cem_jax.config import Config, OptimizerConfig, differences, leaves
from cem_jax.errors import UserError
from cem_jax.runs.directory import read_config
from cem_jax.train.optimizer import learning_rate

# These change neither the model nor the data it sees.
FREE_SECTIONS = ("log", "checkpoint", "eval", "mesh")
FREE_FIELDS = (
    "data.path",  # the dataset may have moved; its fingerprint must be the same
    "data.prefetch",
    "model.scan_layers",
    "model.remat",
    "model.attention.update",
    "model.attention.implementation",
    "model.attention.block_sizes",
    "model.attention.remat_steps",
    "model.mlp.update",
    "model.mlp.remat_steps",
    "train.microbatch",
    "train.max_bad_steps",
    "train.stall_minutes",
)

# These change what the coming steps do, and are told.
RULED_FIELDS = (
    "train.steps",
    "train.tokens",
    "train.global_batch",
    "data.context",
    *(f"optimizer.{name}" for name in OptimizerConfig.__dataclass_fields__),
)


def is_free(field: str) -> bool:
    """Whether the dotted field changes neither the model nor the data it sees."""
    return field.partition(".")[0] in FREE_SECTIONS or field in FREE_FIELDS


def check_same_run(workdir: epath.Path, config: Config) -> Config:
    """The configuration that the run in `workdir` was last begun with; `config` if it holds none.

    Raises UserError, naming the fields, when that is another run's.
    """
    folder = workdir / "checkpoints"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file, where a run has a directory; use another --workdir")
    present = read_config(workdir)
    if present is None:
        if folder.exists():
            raise UserError(
                f"{workdir}: has checkpoints/ but no config.json; put it back (each checkpoint's "
                f"info/metadata holds its fields, under extra), or use another --workdir"
            )
        return config
    changed = [d for d in differences(present, config) if _kind(d) == "fixed"]
    if changed:
        raise UserError(
            f"{workdir}: belongs to a run of another configuration; use another --workdir, or "
            "undo these changes (there -> now)",
            *changed,
        )
    return present


def changes(before: Config, now: Config) -> dict[str, tuple]:
    """The fields that are told when they change: name -> (before, now)."""
    old, new = leaves(before), leaves(now)
    return {name: (old[name], new[name]) for name in RULED_FIELDS if old[name] != new[name]}


def surplus(config: Config, extra: Mapping[str, Any]) -> int:
    """Tokens seen up to the checkpoint that holds `extra`, beyond those of as many steps of now."""
    as_now = extra.get("step", 0) * config.tokens_per_step
    return extra.get("tokens", as_now) - as_now


def length(config: Config, extra: Mapping[str, Any]) -> tuple[int, float]:
    """(total steps, `ahead` of the schedule) of a run that goes on where the checkpoint is that
    holds `extra`; from the beginning for an empty one."""
    if config.train.steps is not None:
        return config.total_steps, 0.0
    more, per_step = surplus(config, extra), config.tokens_per_step
    return config.train.total_steps(per_step, more), more / per_step


def require_steps_left(
    workdir: epath.Path, extra: Mapping[str, Any], before: Config, now: Config
) -> None:
    """Raises UserError for a finished run, whose last checkpoint holds `extra`, where batch,
    context or schedule changed."""
    told = [f"{name}: {old!r} -> {new!r}" for name, (old, new) in changes(before, now).items()]
    if told:
        is_at, end, field = f"step {extra['step']}", f"step {now.train.steps}", "train.steps"
        if now.train.steps is None:
            is_at += f", {extra['tokens']:,} tokens"
            end, field = f"{now.train.tokens:,} tokens", "train.tokens"
        raise UserError(
            f"{workdir}: the run is at {is_at}, and with these changes it ends at {end}; raise "
            f"{field}, or undo them (there -> now)",
            *told,
        )


def windows_consumed(extra: Mapping[str, Any], now: Config) -> int:
    """The window number at which the run goes on whose checkpoint holds `extra`."""
    consumed, length = extra["windows_consumed"], extra["config"]["data"]["context"]
    return consumed if length == now.data.context else consumed * length // now.data.context


def rule(extra: Mapping[str, Any], consumed: int, before: Config, now: Config) -> list[str]:
    """How the run goes on under `now`: a line for each thing that is not as before.

    Args:
      extra: of the checkpoint that it goes on from.
      consumed: the window number at which it goes on.
    """
    changed = changes(before, now)
    if not changed:
        return []
    step = extra["step"]
    lines = [
        f"{name}: {old!r} -> {new!r} from step {step} on" for name, (old, new) in changed.items()
    ]
    rates = [_rate(extra, config) for config in (before, now)]
    ends = [length(config, extra)[0] for config in (before, now)]
    if rates[0] != rates[1] or ends[0] != ends[1]:
        at = f"step {step}"
        if now.train.steps is None:
            at = f"{extra['tokens']:,} of {now.train.tokens:,} tokens"
        lines.append(
            f"schedule: the new one's at {at}: learning rate {rates[1]:.4g}, was {rates[0]:.4g}; "
            f"the end is step {ends[1]}, was {ends[0]}"
        )
    place = f"step {step} begins with window {consumed} of the order"
    if "data.context" in changed:
        lines.append(
            f"data: windows of another length are cut and shuffled anew; {place}, as many tokens "
            "into it: some of this epoch's may come again, others be left out"
        )
    elif "train.global_batch" in changed:
        lines.append(f"data: {place}, the first that was not seen")
    return lines


def _rate(extra: Mapping[str, Any], config: Config) -> float:
    total, ahead = length(config, extra)
    at = jnp.asarray(min(extra["step"], total - 1), jnp.int32)
    return float(learning_rate(at, config.optimizer, total, ahead))


def _kind(difference: str) -> str:
    field = difference.partition(":")[0]
    if is_free(field):
        return "free"
    return "ruled" if field in RULED_FIELDS else "fixed"

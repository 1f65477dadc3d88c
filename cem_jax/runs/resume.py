"""Rules for resuming a run, possibly with a changed configuration.

If its batch, context or schedule changes, a run keeps its parameters, optimizer state and step.
With train.steps, it ends at that step, and the learning rate is the new schedule's at the current
step. With train.tokens, it ends at the step nearest to that many tokens, and the learning rate is
the new schedule's at the share of tokens seen so far. The data continue at the first unseen window;
windows of a new length continue after as many tokens of their own order.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from cem_jax.config import Config, OptimizerConfig, differences, leaves
from cem_jax.config.schema import flattened
from cem_jax.errors import UserError
from cem_jax.runs.position import Position
from cem_jax.storage.paths import AnyPath
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

# These change what the coming steps do; changes are reported.
RULED_FIELDS = (
    "train.steps",
    "train.tokens",
    "train.global_batch",
    "data.context",
    *(f"optimizer.{name}" for name in OptimizerConfig.__dataclass_fields__),
)


def is_free(field: str) -> bool:
    """Return whether the dotted field changes neither the model nor the data it sees."""
    return field.partition(".")[0] in FREE_SECTIONS or field in FREE_FIELDS


def as_recorded(present: Config, position: Position) -> Config:
    """Return `present` with its checkpoint's fields, except free ones and the data's location."""
    recorded = flattened(position.config)
    stays = lambda name: is_free(name) or name == "data.mixture"
    return Config.from_dict(
        {n: v if stays(n) else recorded.get(n, v) for n, v in leaves(present).items()}
    )


def other_model(recorded: Config, other: Config) -> list[str]:
    """Return `field: value -> other value` for differing fields that a resumed run must keep."""
    found = differences(recorded, other).items()
    fixed = lambda name: not is_free(name) and name not in RULED_FIELDS
    return [f"{name}: {old!r} -> {new!r}" for name, (old, new) in found if fixed(name)]


def require_same_run(workdir: AnyPath, recorded: Config, now: Config) -> None:
    """Raise UserError, naming the fields, unless `now` can resume the run of `recorded`."""
    if changed := other_model(recorded, now):
        raise UserError(
            f"{workdir}: belongs to a run with another configuration; use another --workdir, or "
            "undo these changes (there -> now)",
            *changed,
        )


def edited_config(workdir: AnyPath, present: Config, position: Position) -> str | None:
    """Return a warning if config.json is not what the checkpoint was trained with, else None."""
    recorded = as_recorded(present, position)
    changed = other_model(present, recorded)
    if present.data.context != recorded.data.context:
        changed.append(f"data.context: {present.data.context} -> {recorded.data.context}")
    if not changed:
        return None
    return (
        f"{workdir / 'config.json'} is not what checkpoint {position.step} was trained with; the "
        f"checkpoint's record is used (config.json -> checkpoint): {'; '.join(changed)}"
    )


def changes(before: Config, now: Config) -> dict[str, tuple]:
    """Return the changed fields to report: name -> (before, now)."""
    found = differences(before, now)
    return {name: found[name] for name in RULED_FIELDS if name in found}


@dataclass(frozen=True)
class Course:
    """The plan of a run from a position on.

    start, total: steps.
    ahead: steps by which the schedule is shifted, since earlier steps had another size.
    surplus: tokens seen so far minus `start` times the tokens per step now.
    window: number of the next window to train on.
    """

    start: int
    total: int
    ahead: float
    surplus: int
    window: int

    @classmethod
    def of(cls, position: Position, config: Config) -> "Course":
        """Plan the run from `position` under `config`."""
        step, per_step = position.step, config.tokens_per_step
        surplus = 0 if position.tokens is None else position.tokens - step * per_step
        total, ahead = config.total_steps, 0.0
        if config.train.steps is None:
            total, ahead = config.train.total_steps(per_step, surplus), surplus / per_step
        window = position.windows_consumed
        if window and position.context != config.data.context:
            window = window * position.context // config.data.context
        return cls(step, total, ahead, surplus, window)

    def tokens(self, step: int, config: Config) -> int:
        """Return the target tokens seen up to `step`."""
        return self.surplus + step * config.tokens_per_step

    def rate(self, config: Config) -> float:
        """Return the learning rate of the next step."""
        at = jnp.asarray(min(self.start, self.total - 1), jnp.int32)
        return float(learning_rate(at, config.optimizer, self.total, self.ahead))


def require_steps_left(workdir: AnyPath, position: Position, before: Config, now: Config) -> None:
    """Raise UserError if changed fields would make a run end before `position`."""
    changed = changes(before, now)
    if changed:
        is_at, end, field = f"step {position.step}", f"step {now.train.steps}", "train.steps"
        if now.train.steps is None:
            is_at += f", {position.tokens:,} tokens"
            end, field = f"{now.train.tokens:,} tokens", "train.tokens"
        raise UserError(
            f"{workdir}: the run is at {is_at}, and with these changes it ends at {end}; raise "
            f"{field}, or undo them (there -> now)",
            *(f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items()),
        )


def report_changes(position: Position, before: Config, now: Config) -> list[str]:
    """Return a line per change in how the run continues from `position` under `now`."""
    changed = changes(before, now)
    if not changed:
        return []
    step = position.step
    lines = [
        f"{name}: {old!r} -> {new!r} from step {step} on" for name, (old, new) in changed.items()
    ]
    old, new = Course.of(position, before), Course.of(position, now)
    old_rate, new_rate = old.rate(before), new.rate(now)
    if old_rate != new_rate or old.total != new.total:
        at = f"step {step}"
        if now.train.steps is None:
            at = f"{position.tokens:,} of {now.train.tokens:,} tokens"
        lines.append(
            f"schedule: switches to the new one at {at}; learning rate {old_rate:.4g} -> "
            f"{new_rate:.4g}, last step {old.total} -> {new.total}"
        )
    begins = f"step {step} begins with window {new.window} of the order"
    if "data.context" in changed:
        lines.append(
            f"data: windows of the new length are shuffled in a new order; {begins}, after as many "
            "tokens: some of this epoch's may repeat, others may be left out"
        )
    elif "train.global_batch" in changed:
        lines.append(f"data: {begins}, the first unseen one")
    return lines

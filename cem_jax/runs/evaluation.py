"""Evaluate a run: loss, perplexity and bits per byte on a whole split."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from cem_jax.config import Config, with_steps
from cem_jax.data.dataset.mixture import Mixture
from cem_jax.errors import UserError
from cem_jax.runs.run import Run
from cem_jax.runs.setup import open_data
from cem_jax.text import Pace, ProgressLine, format_count, format_duration
from cem_jax.train.evaluator import Evaluator

_TOKENS_CPU, _TOKENS = 1 << 11, 1 << 15  # per batch; on CPU, fastest is what fits its caches


def evaluate(
    workdir: str | os.PathLike[str],
    *,
    step: int | None = None,
    split: str | None = None,
    data: str | None = None,
    batch: int | None = None,
    attention_steps: int | None = None,
    mlp_steps: int | None = None,
) -> dict[str, Any]:
    """Evaluate a run's checkpoint on a split of its data; show progress on stderr.

    Args:
      step: the checkpoint; None: the newest.
      split: None: eval.split.
      data: a dataset with the same tokenizer; None: what data.path or data.mixture names.
      batch: windows per batch; None: what suits the device.
      attention_steps, mlp_steps: T, if not as configured.

    Returns:
      The result of `Evaluator`, with `step`, `split` and `seconds`.

    Raises:
      UserError: before any work, if the run, checkpoint, split or dataset is missing or does not
        fit, or the dataset's tokenizer is not the run's.
    """
    run = Run.open(workdir, step)
    config = run.config
    mixture = _open(run, data)
    for dataset in mixture.sources:
        dataset.require_tokenizer(run.tokenizer.hash, f"the run in {run.workdir}")
    split = split or config.eval.split
    batch = batch or default_batch(config, mixture, split)
    config = replace(config, model=with_steps(config.model, attention_steps, mlp_steps))
    evaluator = Evaluator(config, mixture, split, batch=batch)
    began = time.monotonic()
    result = evaluator(run.parameters, _reporter(evaluator.batches(), batch * config.data.context))
    return result | {"step": run.step, "split": split, "seconds": time.monotonic() - began}


def default_batch(config: Config, mixture: Mixture, split: str) -> int:
    """Return the windows per batch that suit the device, at most those of the split."""
    tokens = _TOKENS_CPU if jax.default_backend() == "cpu" else _TOKENS
    context = config.data.context
    windows = max(-(-(part.split(split).tokens - 1) // context) for part in mixture.parts(split))
    return max(1, min(tokens // context, windows))


def _open(run: Run, data: str | None) -> Mixture:
    try:
        if data is None:
            return open_data(run.config)
        elsewhere = replace(run.config.data, path=data, mixture=())
        return open_data(replace(run.config, data=elsewhere))
    except UserError as error:
        if data is not None:
            raise
        hint = (
            f"(the data is what {run.workdir / 'config.json'} names in data.path or data.mixture; "
            "--data DIR evaluates on another dataset)"
        )
        raise UserError(*error.messages, hint) from None


def _reporter(total: int, tokens: int) -> Callable[[int], None]:
    """Return a function that shows how many of `total` batches (of `tokens` each) are done."""
    line, pace = ProgressLine(sys.stderr), Pace(total)

    def report(done: int) -> None:
        speed = pace.per_second(done)  # not counting the first batch, which compiles
        if line.is_due():
            parts = [f"batch {done}/{total}"]
            if speed is not None:
                parts.append(f"{format_count(speed * tokens)} tok/s")
                parts.append(f"ETA {format_duration(pace.seconds_left(done))}")
            line.show(*parts)
        if done == total:
            line.clear()

    return report

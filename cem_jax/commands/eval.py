"""`cem eval`: loss, perplexity and bits per byte of a whole split."""

import argparse
import sys
import time
from typing import Any, TextIO

import jax

from cem_jax.config import Config
from cem_jax.data.dataset.mixture import Mixture
from cem_jax.errors import UserError
from cem_jax.runs.progress import format_count, format_duration
from cem_jax.runs.run import Run
from cem_jax.train.evaluator import Evaluator
from cem_jax.train.setup import open_data

_TOKENS_CPU, _TOKENS = 1 << 11, 1 << 15  # of a batch; on CPU, what its caches hold is fastest


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a checkpoint on a split of the data that its run was configured with.

    Raises UserError, before any work, for a run, checkpoint, split or dataset that does not exist
    or does not fit: a tokenizer other than the run's is refused.
    """
    run = Run.open(args.workdir)
    config, tokenizer = run.config, run.tokenizer()
    mixture = _open(run)
    for dataset in mixture.sources:
        dataset.require_tokenizer(tokenizer.hash, f"the run in {run.workdir}")
    split = args.split or config.eval.split
    evaluator = Evaluator(
        config,
        mixture,
        split,
        batch=args.batch or default_batch(config, mixture, split),
        attention_steps=args.attention_steps,
        mlp_steps=args.mlp_steps,
    )
    parameters, step = run.parameters(args.step)
    progress = _Progress(evaluator.batches(), sys.stderr)
    result = evaluator(parameters, progress.report)
    result |= {"step": step, "split": split, "seconds": progress.seconds}
    _print(result, sys.stderr if args.json else sys.stdout)
    return result


def default_batch(config: Config, mixture: Mixture, split: str) -> int:
    """Windows at a time: what suits the device, but no more than the split has."""
    tokens = _TOKENS_CPU if jax.default_backend() == "cpu" else _TOKENS
    context = config.data.context
    windows = max(-(-(part.split(split).tokens - 1) // context) for part in mixture.parts(split))
    return max(1, min(tokens // context, windows))


def _open(run: Run) -> Mixture:
    try:
        return open_data(run.config)
    except UserError as error:
        hint = (
            f"(the data is what {run.workdir / 'config.json'} names in data.path or data.mixture)"
        )
        raise UserError(*error.messages, hint) from None


class _Progress:
    """Batches done and the time left, on a line that moves or every few seconds on a new one."""

    def __init__(self, total: int, stream: TextIO):
        self._total, self._stream = total, stream
        self._moving = stream.isatty()
        self._every = 0.5 if self._moving else 5.0
        self._start = self._last = time.monotonic()
        self._first: float | None = None  # when the first batch, which compiles, was done

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def report(self, done: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        last = done == self._total
        if now - self._last < self._every and not (last and self._moving):
            return
        self._last = now
        line = f"batch {done}/{self._total}"
        if done > 1:
            left = (now - self._first) / (done - 1) * (self._total - done)
            line += f"  ETA {format_duration(left)}"
        self._stream.write(f"\r{line:<40}" + "\n" * last if self._moving else line + "\n")
        self._stream.flush()


def _print(result: dict[str, Any], out: TextIO) -> None:
    sources = result.get("sources", {})
    for name, values in {**sources, f"{result['split']}, step {result['step']}": result}.items():
        bits = values["bits_per_byte"]
        print(
            f"{name}: loss {values['loss']:.4f}, perplexity {values['perplexity']:.2f}, "
            + (f"{bits:.4f} bits per byte" if bits is not None else "no bytes to count by")
            + f" ({values['tokens']:,} tokens, {values['bytes']:,} bytes)",
            file=out,
        )
    rate = result["tokens"] / max(result["seconds"], 1e-9)
    print(f"{format_duration(result['seconds'])}, {format_count(rate)} tokens/s", file=out)

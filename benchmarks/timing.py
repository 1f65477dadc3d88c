"""Interleaved timing of several calls in one run: ratios of medians survive a noisy machine."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import jax


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return each call's median seconds after one warm-up; the order rotates every round."""
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        jax.block_until_ready(calls[name]())
    for round_index in range(rounds):
        for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
            began = time.perf_counter()
            jax.block_until_ready(calls[name]())
            seconds[name].append(time.perf_counter() - began)
    return {name: median(values) for name, values in seconds.items()}


class Stepper:
    """A compiled training step with the state it carries; calling it makes one step."""

    def __init__(self, step, state, batch):
        self.state, self.batch = state, batch
        self.compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()

    def __call__(self):
        self.state, measured = self.compiled(self.state, self.batch)
        return measured

    @property
    def flops(self) -> float:
        """Return XLA's count of FLOPs; the body of a loop is counted once."""
        return self.compiled.cost_analysis()["flops"]

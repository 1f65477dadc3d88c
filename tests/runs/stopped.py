"""Simulate a signal after a given step."""

import signal

from cem_jax.runs.signals import Stop


def stop_after(step: int) -> dict:
    """Return arguments of `train` that act as if SIGTERM came during `step`."""

    def never(status: int, line: str) -> None:
        raise AssertionError(line)

    stop = Stop(60, never, lambda line: None)
    send = lambda done: stop.request(signal.SIGTERM) if done == step else None
    return {"stop": stop, "after_step": send}

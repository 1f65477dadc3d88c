"""A signal that comes after a given step, without a signal."""

import signal

from cem_jax.runs.signals import Stop


def stop_after(step: int) -> dict:
    """Arguments of `train`, as if SIGTERM came while `step` was at work."""

    def never(status: int, line: str) -> None:
        raise AssertionError(line)

    stop = Stop(60, never, lambda line: None)
    send = lambda done: stop.request(signal.SIGTERM) if done == step else None
    return {"stop": stop, "after_step": send}

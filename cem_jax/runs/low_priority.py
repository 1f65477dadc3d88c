"""Threads that work beside the training steps, and should not hold them up."""

import contextlib
import os
from collections.abc import Iterator

NICENESS = 15  # at 10 a step still takes 1.3 times as long; at 19 a busy machine would stop a save


@contextlib.contextmanager
def behind_the_steps() -> Iterator[None]:
    """The threads started within it, and those they start, take what processor time is left over.

    As an equal of the steps' own threads, which wait for each other, one that compresses arrays on
    the same cores slows a step by half, and is done no sooner. Of effect on Linux alone.
    """
    before = _threads()
    try:
        yield
    finally:
        for thread in _threads() - before:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def _threads() -> set[int]:
    """Of this process, as the kernel numbers them."""
    try:
        return set(map(int, os.listdir("/proc/self/task")))
    except OSError:
        return set()

"""Only the threads that save have a lower priority."""

import os
import sys
import threading

import pytest
from checkpoint_states import make_state

from cem_jax.runs import checkpoints
from cem_jax.runs.arrays import NICENESS, low_priority_threads
from cem_jax.runs.position import Position

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def waiting(release, inner=None):
    """Start a thread that waits for `inner`, then starts another that reports its niceness."""

    def run():
        release.wait(60)
        if inner is not None:
            child = threading.Thread(target=lambda: inner.append(niceness(0)))
            child.start()
            child.join()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_threads_started_inside_and_their_children_are_nicer():
    release, of_child = threading.Event(), []
    own = niceness(0)
    before = waiting(release)
    with low_priority_threads():
        within = waiting(release, of_child)
    after = waiting(release)
    found = [niceness(thread.native_id) for thread in (before, within, after)]
    release.set()
    for thread in (before, within, after):
        thread.join()
    assert found == [own, max(own, NICENESS), own]
    assert of_child == [max(own, NICENESS)] and niceness(0) == own


def test_a_save_is_written_behind_the_steps(opened, monkeypatch):
    nice = []
    unpatched = checkpoints.write_checksums

    def write(directory):
        nice.append(niceness(0))
        unpatched(directory)

    monkeypatch.setattr(checkpoints, "write_checksums", write)
    own, saver = niceness(0), opened()
    for step in (1, 2):
        saver.save(make_state(), Position(step))
        saver.wait()
    assert len(nice) == 2 and set(nice) <= {own, max(own, NICENESS)} and max(own, NICENESS) in nice
    assert niceness(0) == own

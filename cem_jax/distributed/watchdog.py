"""Watches a run of several processes: who stands still, who failed, and an end when either is so.

A collective waits for ever for a process that is alive but stuck, and XLA's own heartbeats only
notice dead ones. So each process tells the coordinator every second that it lives and where it is;
one whose own run makes no progress for too long says who is missing, dumps the stacks of its
threads and ends.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from typing import Any, NoReturn

from cem_jax.distributed.rendezvous import numbered, whoami

_GRACE = 2.0  # seconds between hearing of a failure and ending, so that one's own is told first
_ANSWER = 5.0  # seconds that the coordinator has to answer
_ALIVE, _FAILED = "cem/alive", "cem/failed"


class Watchdog:
    """One process's view of the others, through JAX's coordination service.

    Args:
      client: JAX's coordination client: its calls may block, so none is made by the main thread.
      process, processes: this one's number, and how many there are.
      seconds: without progress, after which the run counts as stuck.
    """

    def __init__(self, client: Any, process: int, processes: int, seconds: float):
        self._client, self._process, self._processes = client, process, processes
        self._seconds = seconds
        # Many processes speak less often, and nobody reads all the others' words without need.
        self.tick = min(max(1.0, processes / 64), seconds / 4)
        self._mark, self._where = time.monotonic(), "joining"
        self._stopped = threading.Event()
        self._ending = threading.Lock()

    def start(self) -> None:
        """Begin to watch and to be seen."""
        for target in (self._speak, self._watch):
            threading.Thread(target=target, name=f"cem{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        """End quietly."""
        self._stopped.set()

    def progress(self, where: str) -> None:
        """The run has got to `where` just now."""
        self._where, self._mark = where, time.monotonic()

    def tell_failure(self, code: int, message: str) -> None:
        """Let the other processes end as well; the first failure counts. Never blocks for long."""
        failure = {"process": self._process, "who": whoami(), "code": code, "message": message}
        put = lambda: self._client.key_value_set(_FAILED, json.dumps(failure))
        _within(_ANSWER, put)

    def linger(self) -> None:
        """Give the others the time to hear of a failure: the coordinator takes all down with it."""
        if self._process == 0:
            time.sleep(2 * self.tick + _GRACE)

    def abandon(self, *lines: str, code: int = 1, tell: bool = True) -> NoReturn:
        """Say `lines` and end this process at once, from any thread."""
        if not self._ending.acquire(blocking=False):
            time.sleep(3600)  # another thread is at it
        for line in lines:
            complain(f"process {self._process}: {line}")
        if tell:
            self.tell_failure(code, "; ".join(lines))
            self.linger()
        end_at_once(code)

    def missing(self) -> list[str]:
        """One line for each group of processes that is not where this one is."""
        before = self._states()
        time.sleep(2 * self.tick + 0.5)
        after = self._states()
        if before is None or after is None:
            return ["process 0, the coordinator, does not answer"]
        silent = [p for p in range(self._processes) if before.get(p) == after.get(p)]
        lines = [
            f"process {p} ({after[p]['who']}) gives no sign of life; last seen at "
            f"{after[p]['where']}"
            if p in after
            else f"process {p} has not been seen"
            for p in silent[:12]
        ]
        lines += [f"{numbered(silent)} give no sign of life"] if len(silent) > 12 else []
        places: dict[str, list[int]] = {}
        for p, state in sorted(after.items()):
            if p not in silent:
                places.setdefault(state["where"], []).append(p)
        lines += [f"at {where}: {numbered(group)}" for where, group in places.items()]
        return lines

    # ---- threads ----

    def _speak(self) -> None:
        """Tells that this process lives; hears of a failure of another."""
        count = 0
        while not self._stopped.wait(self.tick):
            count += 1
            state = {"count": count, "who": whoami(), "where": self._where}
            with contextlib.suppress(Exception):  # a dead coordinator is JAX's to notice
                self._client.key_value_set(
                    f"{_ALIVE}/{self._process}", json.dumps(state), allow_overwrite=True
                )
            with contextlib.suppress(Exception):
                self._hear(json.loads(self._client.key_value_try_get(_FAILED)))

    def _hear(self, failure: dict[str, Any]) -> None:
        if failure["process"] == self._process or self._stopped.wait(_GRACE):
            return
        line = f"process {failure['process']} ({failure['who']}) failed: {failure['message']}"
        self.abandon(line, code=failure["code"], tell=False)

    def _watch(self) -> None:
        woken = time.monotonic()
        while not self._stopped.wait(min(self.tick, 1.0)):
            now = time.monotonic()
            if now - woken > self.tick + 10:  # this process itself was suspended
                self._mark = now
            woken = now
            if now - self._mark > self._seconds:
                self._give_up(now - self._mark)

    def _give_up(self, seconds: float) -> None:
        where = self._where
        lines = _within(_ANSWER + 4 * self.tick, self.missing)
        if self._where != where or self._stopped.is_set():
            return  # it went on after all
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        self.abandon(
            f"no progress for {seconds:.0f} s (train.stall_minutes) since {where}",
            *(lines or ["process 0, the coordinator, does not answer"]),
        )

    def _states(self) -> dict[int, dict[str, Any]] | None:
        """What each process last said, None when the coordinator does not answer."""
        entries = _within(_ANSWER, lambda: self._client.key_value_dir_get(_ALIVE))
        if entries is None:
            return None
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in entries}


def complain(line: str) -> None:
    """An error's line, from any thread, whether or not anybody reads it."""
    with contextlib.suppress(OSError):
        print(f"cem: error: {line}", file=sys.__stderr__, flush=True)


def end_at_once(code: int) -> NoReturn:
    """Exit without JAX's farewell, which waits for processes that may never come."""
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _within(seconds: float, function: Any) -> Any:
    """The result of `function`, None when it fails or takes longer."""
    result = []

    def call() -> None:
        with contextlib.suppress(Exception):
            result.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None

"""Ends a multi-process run, naming the processes to blame, if one fails or gets stuck.

A collective waits forever for a process that is alive but stuck, and XLA's heartbeats only notice
dead ones. So each process reports to the coordinator every second that it is alive and where it is;
if its own run makes no progress for too long, it names the missing ones, dumps the stacks of its
threads and exits.
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

_GRACE = 2.0  # seconds from hearing of a failure to exit, so that an own failure is reported first
_ANSWER = 5.0  # seconds to wait for the coordinator's answer
_ALIVE, _FAILED = "cem/alive", "cem/failed"


class Watchdog:
    """One process's view of the others, through JAX's coordination service.

    Args:
      client: JAX's coordination client; its calls may block, so the main thread makes none.
      process, processes: this process's number, and the number of processes.
      seconds: time without progress after which the run counts as stuck.
    """

    def __init__(self, client: Any, process: int, processes: int, seconds: float):
        self._client, self._process, self._processes = client, process, processes
        self._seconds = seconds
        # With many processes each reports less often; the reports are only read on suspicion.
        self.tick = min(max(1.0, processes / 64), seconds / 4)
        self._mark, self._where = time.monotonic(), "joining"
        self._stopped = threading.Event()
        self._ending = threading.Lock()

    def start(self) -> None:
        """Start watching, and reporting to the others."""
        for target in (self._speak, self._watch):
            threading.Thread(target=target, name=f"cem{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Stop both threads."""
        self._stopped.set()

    def progress(self, where: str) -> None:
        """Record that the run has just reached `where`."""
        self._where, self._mark = where, time.monotonic()

    def tell_failure(self, code: int, message: str) -> None:
        """Make the others end too; only the first failure counts. Never blocks for long."""
        failure = {"process": self._process, "who": whoami(), "code": code, "message": message}
        put = lambda: self._client.key_value_set(_FAILED, json.dumps(failure))
        _within(_ANSWER, put)

    def linger(self) -> None:
        """Give the others time to hear of a failure: the coordinator's exit takes all down."""
        if self._process == 0:
            time.sleep(2 * self.tick + _GRACE)

    def abandon(self, *lines: str, code: int = 1, tell: bool = True) -> NoReturn:
        """Print `lines` and end this process at once, from any thread."""
        if not self._ending.acquire(blocking=False):
            time.sleep(3600)  # another thread is ending the process
        for line in lines:
            complain(f"process {self._process}: {line}")
        if tell:
            self.tell_failure(code, "; ".join(lines))
            self.linger()
        end_at_once(code)

    def missing(self) -> list[str]:
        """Return a line per silent process, and per place with the processes that are there."""
        before = self._states()
        time.sleep(2 * self.tick + 0.5)
        after = self._states()
        if before is None or after is None:
            return ["process 0, the coordinator, does not answer"]
        silent = [p for p in range(self._processes) if before.get(p) == after.get(p)]
        lines = [
            f"process {p} ({after[p]['who']}) is not responding; last seen at {after[p]['where']}"
            if p in after
            else f"process {p} has not been seen"
            for p in silent[:12]
        ]
        lines += [f"{numbered(silent)} are not responding"] if len(silent) > 12 else []
        places: dict[str, list[int]] = {}
        for p, state in sorted(after.items()):
            if p not in silent:
                places.setdefault(state["where"], []).append(p)
        lines += [f"at {where}: {numbered(group)}" for where, group in places.items()]
        return lines

    def _speak(self) -> None:
        """Report that this process is alive; listen for failures of others."""
        count = 0
        while not self._stopped.wait(self.tick):
            count += 1
            state = {"count": count, "who": whoami(), "where": self._where}
            with contextlib.suppress(Exception):  # JAX notices a dead coordinator
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
            return  # it made progress after all
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        self.abandon(
            f"no progress for {seconds:.0f} s (train.stall_minutes) since {where}",
            *(lines or ["process 0, the coordinator, does not answer"]),
        )

    def _states(self) -> dict[int, dict[str, Any]] | None:
        """Return the last report of each process; None if the coordinator does not answer."""
        entries = _within(_ANSWER, lambda: self._client.key_value_dir_get(_ALIVE))
        if entries is None:
            return None
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in entries}


def complain(line: str) -> None:
    """Print an error from any thread, even if stderr is closed."""
    with contextlib.suppress(OSError):
        print(f"cem: error: {line}", file=sys.__stderr__, flush=True)


def end_at_once(code: int) -> NoReturn:
    """Exit without JAX's shutdown, which waits for processes that may never come."""
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _within(seconds: float, function: Any) -> Any:
    """Return the result of `function`, or None if it fails or takes longer."""
    result = []

    def call() -> None:
        with contextlib.suppress(Exception):
            result.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None

"""Signals: make the run save and end within a time limit, whatever it is doing.

Python runs signal handlers only between bytecodes of its main thread, and compiling or waiting for
a device may take minutes. The C part of the handler, though, writes the signal's number to a socket
at once (`signal.set_wakeup_fd`); a thread reads it, tells the training loop and enforces the limit.
"""

import contextlib
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Schedulers announce the end of a job by any of these; SIGHUP also means a closed terminal.
_ANNOUNCED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *_ANNOUNCED)
_COURTESY = 1.0  # seconds for an orderly end if there is nothing to save


class Stop:
    """Holds the request to stop, and ends the process if it does not stop in time.

    Args:
      grace: seconds from the first signal to exit, saved or not.
      end: ends the process, from any thread; receives the exit status and a message.
      say: receives one line at the first signal.
    """

    def __init__(self, grace: float, end: Callable[[int, str], None], say: Callable[[str], None]):
        self.signal: int | None = None
        self._grace, self._end, self._say = grace, end, say
        self._something_to_save = False
        self._deadline = math.inf
        self._lock = threading.Lock()

    @property
    def status(self) -> int:
        """Exit status of a process ended by this signal."""
        return 128 + (self.signal or 0)

    def something_to_save(self) -> None:
        """Record that steps are unsaved: from now on, stopping waits for a save."""
        self._something_to_save = True

    def request(self, number: int) -> None:
        """Handle a signal. Only the first counts; another one while saving is harmless."""
        with self._lock:
            if self.signal is not None:
                return
            self.signal = number
            wait = self._grace if self._something_to_save else min(_COURTESY, self._grace)
            self._deadline = time.monotonic() + wait
        plan = f"saving, for at most {self._grace:.0f} s" if self._something_to_save else "ending"
        self._say(f"{signal.Signals(number).name}: {plan}")

    def seconds_left(self) -> float:
        """Return the seconds until the process is ended; infinite before a signal."""
        return self._deadline - time.monotonic()

    def expire(self) -> None:
        """End the process, since its time is up."""
        name = signal.Signals(self.signal).name
        if self._something_to_save:
            why = f"did not stop within {self._grace:.0f} s of {name} (checkpoint.grace_seconds)"
        else:
            why = f"{name} before the first step"
        self._end(self.status, f"{why}; saved checkpoints remain; the same command resumes")


@contextmanager
def watched(stop: Stop) -> Iterator[Stop]:
    """Send SIGNALS to `stop` while inside; does nothing outside the main thread.

    What this process was started to ignore stays ignored (`nohup`), except SIGINT and SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    heard, told = socket.socketpair()
    heard.setblocking(True)
    told.setblocking(False)
    # The handlers do nothing; they only keep a signal from killing the process.
    ignored = {number for number in _ANNOUNCED if signal.getsignal(number) == signal.SIG_IGN}
    watch = (number for number in SIGNALS if number not in ignored)
    before = {number: signal.signal(number, lambda *_: None) for number in watch}
    descriptor = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(stop, heard), name="cem_signals", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        told.close()  # ends the thread
        thread.join()
        heard.close()


def _watch(stop: Stop, heard: socket.socket) -> None:
    while True:
        left = stop.seconds_left()
        heard.settimeout(None if math.isinf(left) else max(left, 0.01))
        with contextlib.suppress(TimeoutError):
            numbers = heard.recv(64)
            if not numbers:
                return
            for number in numbers:
                if number in SIGNALS:
                    stop.request(number)
        if stop.seconds_left() <= 0:
            stop.expire()
            return

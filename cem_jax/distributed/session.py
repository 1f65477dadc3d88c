"""Join the processes of a run, make them agree, and build arrays from each one's rows.

`current()` is this process's `Session` within `joined`, and otherwise `Alone`, which has the same
methods without communication. What needs no communication is a function.
"""

import atexit
import json
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from cem_jax.distributed.cluster import Cluster
from cem_jax.distributed.rendezvous import meet, numbered, whoami
from cem_jax.distributed.watchdog import Watchdog, complain, end_at_once
from cem_jax.errors import RunFailed, UserError
from cem_jax.sharding.axes import MESH_AXES
from cem_jax.sharding.mesh import require_devices

_CONNECT_SECONDS = 120  # all processes have already met
_HEARTBEAT_SECONDS = 100  # until XLA considers a silent process dead
_FAREWELL_SECONDS = 60
_SEEN_SECONDS = 90  # network file systems cache that a file does not exist


class Alone:
    """The only process of a run."""

    processes = 1
    is_first = True

    def progress(self, where: str) -> None:
        """Do nothing: there is no watchdog."""

    def leave(self, code: int, line: str) -> NoReturn:
        """Print `line` and end this process at once, from any thread."""
        complain(line)
        end_at_once(code)

    def lost(self, error: BaseException) -> None:
        """Do nothing: no other process can be the cause."""

    def barrier(self, what: str) -> None:
        """Do nothing: there are no others to wait for."""

    def shared(self, what: str, function: Callable[[], Any]) -> Any:
        """Return `function()`."""
        return function()

    def agree(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Do nothing: there are no others to compare with."""

    def await_file(self, path: Path) -> None:
        """Do nothing: a process sees its own files."""

    def wishes(self, mesh: Mesh) -> "OwnWishes":
        """Return an object that settles numbers at once."""
        return OwnWishes()


class Session:
    """This process's connection to the others of a run.

    Args:
      seconds: timeout of every wait for other processes.
    """

    def __init__(self, cluster: Cluster, seconds: float):
        # JAX has no public name for the client of its coordination service (key-value store and
        # barriers); Orbax imports it from here too. If it moves, multi-process runs fail at this
        # line, before doing anything; single-process runs never get here.
        from jax._src import distributed

        self.cluster, self.seconds = cluster, seconds
        self.client = distributed.global_state.client
        self.watchdog = Watchdog(self.client, cluster.process, cluster.processes, seconds)
        self._count = 0
        self._put("who", whoami())

    @property
    def processes(self) -> int:
        """Number of processes in the run."""
        return self.cluster.processes

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return jax.process_index() == 0

    def progress(self, where: str) -> None:
        """Report to the watchdog that the run has reached `where`; its timeout starts again."""
        self.watchdog.progress(where)

    def leave(self, code: int, line: str) -> NoReturn:
        """Print `line` and end this process at once, from any thread; the others end too."""
        self.watchdog.abandon(line, code=code)

    def lost(self, error: BaseException) -> None:
        """End this process after a failed computation, possibly caused by other processes.

        Prints what failed and which processes are missing.
        """
        traceback.print_exception(error)
        first = str(error).strip().split("\n")[0][:300]
        self.watchdog.abandon(f"a computation failed: {first}", *self.watchdog.missing())

    def barrier(self, what: str) -> None:
        """Wait for all processes. Raises RunFailed after the timeout, naming the missing ones."""
        name = self._name(what)
        self._put(f"at/{name}", "")
        try:
            self.client.wait_at_barrier(f"cem/{name}", self._milliseconds)
        except jax.errors.JaxRuntimeError as error:
            there, known = self._values(f"at/{name}"), self._values("who")
            absent = [p for p in range(self.processes) if p not in there]
            if not absent:
                raise RunFailed(f"barrier {what!r} failed: {error}") from error
            who = ", ".join(f"{p}: {known.get(p, 'unknown')}" for p in absent[:12])
            raise RunFailed(
                f"{numbered(absent)} did not reach {what!r} within {self.seconds:.0f} s "
                f"(train.stall_minutes); {who}"
            ) from None

    def shared(self, what: str, function: Callable[[], Any]) -> Any:
        """Return the first process's `function()` in all processes; it must be plain JSON.

        Raises:
          UserError, RunFailed: as the first process did.
        """
        key = f"cem/shared/{self._name(what)}"
        if self.is_first:
            try:
                value = function()
            except (UserError, RunFailed) as error:
                kind = "user" if isinstance(error, UserError) else "failed"
                lines = str(error).splitlines()
                self.client.key_value_set(key, json.dumps({"error": kind, "lines": lines}))
                raise
            self.client.key_value_set(key, json.dumps({"value": value}))
            return value
        try:
            answer = json.loads(self.client.blocking_key_value_get(key, self._milliseconds))
        except jax.errors.JaxRuntimeError:
            raise RunFailed(f"the first process did not send {what!r} in time") from None
        if "error" in answer:
            lines = [f"first process: {line}" for line in answer["lines"]]
            raise UserError(*lines) if answer["error"] == "user" else RunFailed("; ".join(lines))
        return answer["value"]

    def agree(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Check that `facts()`, plain JSON values by name, are equal in all processes.

        Raises:
          UserError: they differ; names the facts and the processes.
        """
        self._put("facts", json.dumps(dict(facts())))
        self.barrier("comparing configurations")
        self.shared("the comparison of configurations", self._compare)

    def _compare(self) -> None:
        texts, known = self._values("facts"), self._values("who")
        facts = {process: json.loads(text) for process, text in sorted(texts.items())}
        lines = []
        for name in dict.fromkeys(name for values in facts.values() for name in values):
            groups: dict[str, list[int]] = {}
            for process, values in facts.items():
                groups.setdefault(json.dumps(values.get(name)), []).append(process)
            if len(groups) > 1:
                values = "; ".join(
                    f"{value} on {numbered(group)} ({known[group[0]]})"
                    for value, group in groups.items()
                )
                lines.append(f"{name} differs between processes: {values}")
        if lines:
            raise UserError(*lines)

    def await_file(self, path: Path) -> None:
        """Wait until every process sees `path`, which the first one has written.

        Raises:
          UserError: it does not become visible here, so the directory is not shared.
        """
        self.barrier(f"writing {path.name}")
        deadline = time.monotonic() + min(_SEEN_SECONDS, self.seconds)
        while not path.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path}: process {self.cluster.process} ({whoami()}) does not see what the "
                    "first process wrote; --workdir must be a directory that all processes share"
                )
            time.sleep(0.2)

    def wishes(self, mesh: Mesh) -> "Wishes":
        """Return an object that settles numbers among all processes; `mesh`: of all devices."""
        return Wishes(mesh)

    def fail(self, error: BaseException) -> None:
        """Report `error` to the others, and make this process exit without waiting for them."""
        own = isinstance(error, KeyboardInterrupt)
        code = 2 if isinstance(error, UserError) else 130 if own else 1
        message = "; ".join(str(error).splitlines()) or type(error).__name__
        self.watchdog.tell_failure(code, message)

        def leave() -> None:
            self.watchdog.linger()
            end_at_once(code)

        atexit.register(leave)  # runs before JAX's own, which was registered earlier
        self.watchdog.stop()

    @property
    def _milliseconds(self) -> int:
        return int(1000 * self.seconds)

    def _name(self, what: str) -> str:
        """Return a fresh key; all processes ask in the same order, and so get the same key."""
        self._count += 1
        return f"{self._count}/{what}"

    def _put(self, what: str, value: str) -> None:
        self.client.key_value_set(f"cem/{what}/{self.cluster.process}", value)

    def _values(self, what: str) -> dict[int, str]:
        """Return the value that each process has put, by process number."""
        pairs = self.client.key_value_dir_get(f"cem/{what}")
        return {int(key.rpartition("/")[2]): value for key, value in pairs}


_current: Alone | Session = Alone()


def current() -> Alone | Session:
    """Return this process's session."""
    return _current


@contextmanager
def joined(cluster: Cluster | None, minutes: float) -> Iterator[None]:
    """Join the processes of `cluster` within the block; None: this is the only one.

    Every wait for other processes ends after `minutes`. If one fails, all end with its exit status.

    Raises:
      RunFailed: not all processes joined.
    """
    global _current
    if cluster is None:
        yield
        return
    seconds = 60 * minutes
    meet(cluster, seconds)
    _connect(cluster)
    _current = session = Session(cluster, seconds)
    session.watchdog.start()
    try:
        _require_processes(cluster)
        yield
        session.barrier("end")
    except SystemExit:  # all stop at the same step
        session.barrier("end")
        raise
    except BaseException as error:
        session.fail(error)
        raise
    session.watchdog.stop()


def _connect(cluster: Cluster) -> None:
    # The training loop handles signals: JAX's notifier would take SIGTERM away from it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.processes,
        cluster.process,
        local_device_ids=cluster.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=_CONNECT_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_FAREWELL_SECONDS,
    )


def _require_processes(cluster: Cluster) -> None:
    require_devices()
    if jax.process_count() != cluster.processes:
        raise RunFailed(
            f"{cluster.source} gave {cluster.processes} processes, but JAX's "
            f"{jax.default_backend()} devices belong to {jax.process_count()}"
        )


def local_rows(sharding: Sharding, rows: int) -> np.ndarray:
    """Return the sorted row indices, of a batch split by `sharding`, that this process holds.

    Several devices may hold the same rows.
    """
    places = sharding.addressable_devices_indices_map((rows,))
    every = np.arange(rows)
    return np.unique(np.concatenate([every[index] for (index,) in places.values()]))


def global_arrays(local: Any, sharding: Sharding) -> Any:
    """Make arrays over all devices of `sharding` from each process's `local_rows`."""
    devices = len(sharding.device_set)
    share = len(local_rows(sharding, devices))

    def whole(array: np.ndarray) -> jax.Array:
        shape = (len(array) * devices // share, *array.shape[1:])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return jax.tree.map(whole, local)


def together(what: str, jitted: Any) -> Callable[..., Any]:
    """Return a function that compiles `jitted` at its first call, and runs it once all have.

    All calls must have arguments of the same shapes, dtypes and shardings. Compilation takes longer
    in some processes than in others, and partners of a collective do not wait forever (Gloo: 30 s
    to connect). Explicit compilation also avoids recompiling when an import or a setting has
    changed the key of JAX's own cache.
    """
    compiled: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not compiled:
            compiled.append(jitted.lower(*args).compile())
            current().barrier(f"compiling {what}")
        return compiled[0](*args)

    return call


class OwnWishes:
    """Settles numbers for a single process, at once."""

    def settle(self, *numbers: int) -> tuple[int, ...]:
        """Return `numbers`."""
        return numbers

    def forget(self) -> None:
        """Do nothing: nothing is pending."""


class Wishes:
    """Settles numbers among all processes, as the maximum of each, without waiting.

    Numbers given at one step are settled at the next: by then the devices have computed the
    maximum, enqueued behind that step.

    Args:
      mesh: of all devices.
    """

    def __init__(self, mesh: Mesh):
        self._wished: deque[Any] = deque()
        self._sharding = NamedSharding(mesh, PartitionSpec(MESH_AXES))
        everywhere = NamedSharding(mesh, PartitionSpec())
        largest = jax.jit(lambda x: x.max(axis=0), out_shardings=everywhere)
        self._largest = together("what processes wish", largest)

    def settle(self, *numbers: int) -> tuple[int, ...]:
        """Submit `numbers`; return the maxima of those of the previous call."""
        local = np.tile(np.asarray(numbers, np.int32), (jax.local_device_count(), 1))
        self._wished.append(self._largest(global_arrays(local, self._sharding)))
        if len(self._wished) < 2:
            return (0,) * len(numbers)
        return tuple(map(int, jax.device_get(self._wished.popleft())))

    def forget(self) -> None:
        """Drop submitted numbers that are not settled yet."""
        self._wished.clear()

"""A run of several processes: joining, agreeing, and arrays made of each one's rows.

`current()` is this process among the others: a `Session` within `joined`, else `Alone`, which has
the same methods and communicates with nobody. What has no need to communicate is a function.
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

_CONNECT_SECONDS = 120  # all processes are known to be there
_HEARTBEAT_SECONDS = 100  # after which XLA takes a silent process for dead
_FAREWELL_SECONDS = 60
_SEEN_SECONDS = 90  # network file systems remember for a while that a file was not there


class Alone:
    """The only process of a run."""

    processes = 1
    is_first = True

    def progress(self, where: str) -> None:
        """Nobody watches."""

    def leave(self, code: int, line: str) -> NoReturn:
        """Say `line` and end this process at once, from any thread."""
        complain(line)
        end_at_once(code)

    def lost(self, error: BaseException) -> None:
        """No other process can be the cause."""

    def barrier(self, what: str) -> None:
        """There is nobody to wait for."""

    def shared(self, what: str, function: Callable[[], Any]) -> Any:
        """Return `function()`."""
        return function()

    def agree(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """One process agrees with itself."""

    def await_file(self, path: Path) -> None:
        """What this process wrote, it sees."""

    def wishes(self, mesh: Mesh) -> "OwnWishes":
        """Return a place to settle on numbers."""
        return OwnWishes()


class Session:
    """This process among the others of a run.

    Args:
      seconds: after which a wait for other processes ends.
    """

    def __init__(self, cluster: Cluster, seconds: float):
        # JAX has no public name for the client of its coordination service: key-value store and
        # barriers. Orbax imports it from here too. Should it move, every run of several processes
        # fails at this line, before it has done anything; a run of one never gets here.
        from jax._src import distributed

        self.cluster, self.seconds = cluster, seconds
        self.client = distributed.global_state.client
        self.watchdog = Watchdog(self.client, cluster.process, cluster.processes, seconds)
        self._count = 0
        self._put("who", whoami())

    @property
    def processes(self) -> int:
        """How many processes the run has."""
        return self.cluster.processes

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return jax.process_index() == 0

    def progress(self, where: str) -> None:
        """Tell the watchdog that the run has got to `where`: it starts to wait anew."""
        self.watchdog.progress(where)

    def leave(self, code: int, line: str) -> NoReturn:
        """Say `line` and end this process at once, from any thread; the others end as well."""
        self.watchdog.abandon(line, code=code)

    def lost(self, error: BaseException) -> None:
        """End this process after a failed computation, of which others may be the cause.

        Says what failed and which processes are missing.
        """
        traceback.print_exception(error)
        first = str(error).strip().split("\n")[0][:300]
        self.watchdog.abandon(f"a computation failed: {first}", *self.watchdog.missing())

    def barrier(self, what: str) -> None:
        """Wait for all processes. Raises RunFailed, naming who did not come in the time allowed."""
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
                f"{numbered(absent)} did not come to {what!r} within {self.seconds:.0f} s "
                f"(train.stall_minutes); {who}"
            ) from None

    def shared(self, what: str, function: Callable[[], Any]) -> Any:
        """Return in all processes `function()` of the first one; its value must be plain JSON.

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
            raise RunFailed(f"the first process did not say {what!r} in time") from None
        if "error" in answer:
            lines = [f"first process: {line}" for line in answer["lines"]]
            raise UserError(*lines) if answer["error"] == "user" else RunFailed("; ".join(lines))
        return answer["value"]

    def agree(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Compare what `facts` returns in each process, by name; plain JSON.

        Raises:
          UserError: they are not the same in all of them; names facts and processes.
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
                told = "; ".join(
                    f"{value} on {numbered(group)} ({known[group[0]]})"
                    for value, group in groups.items()
                )
                lines.append(f"{name} differs between processes: {told}")
        if lines:
            raise UserError(*lines)

    def await_file(self, path: Path) -> None:
        """Return when every process sees `path`, which the first one has written.

        Raises:
          UserError: it does not become visible here: the directory is not shared.
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
        """Return a place to settle on numbers; `mesh`: of all devices."""
        return Wishes(mesh)

    def fail(self, error: BaseException) -> None:
        """Tell the others, and see to it that this process does not wait for them at its end."""
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
        """A key used once; the same in all processes, which ask for names in the same order."""
        self._count += 1
        return f"{self._count}/{what}"

    def _put(self, what: str, value: str) -> None:
        self.client.key_value_set(f"cem/{what}/{self.cluster.process}", value)

    def _values(self, what: str) -> dict[int, str]:
        """What each process has put, by its number."""
        pairs = self.client.key_value_dir_get(f"cem/{what}")
        return {int(key.rpartition("/")[2]): value for key, value in pairs}


_current: Alone | Session = Alone()


def current() -> Alone | Session:
    """Return this process's part in the run."""
    return _current


@contextmanager
def joined(cluster: Cluster | None, minutes: float) -> Iterator[None]:
    """Make this process, within the block, one of those of `cluster`; None: the only one.

    Every wait for other processes ends after `minutes`. When one of them fails, all end with its
    exit status.

    Raises:
      RunFailed: not all processes have joined.
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
    # Signals are for the training loop: JAX's notifier would take SIGTERM away from it.
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
    if jax.process_count() != cluster.processes:
        raise RunFailed(
            f"{cluster.source} says that there are {cluster.processes} processes, but JAX's "
            f"{jax.default_backend()} devices belong to {jax.process_count()}"
        )


def local_rows(sharding: Sharding, rows: int) -> np.ndarray:
    """Return the rows, of a batch split by `sharding`, that this process's devices hold, in order.

    Several devices may hold the same ones.
    """
    places = sharding.addressable_devices_indices_map((rows,))
    every = np.arange(rows)
    return np.unique(np.concatenate([every[index] for (index,) in places.values()]))


def global_arrays(local: Any, sharding: Sharding) -> Any:
    """Make arrays over all devices of `sharding`, of which each process gives its `local_rows`."""
    devices = len(sharding.device_set)
    share = len(local_rows(sharding, devices))

    def whole(array: np.ndarray) -> jax.Array:
        shape = (len(array) * devices // share, *array.shape[1:])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return jax.tree.map(whole, local)


def together(what: str, jitted: Any) -> Callable[..., Any]:
    """Compile `jitted` once, at its first call, and run it when all processes have done so.

    All calls must have arguments of the same shapes, dtypes and shardings. Compiling takes some
    processes longer than others, and a collective's partners do not wait for ever (Gloo: 30 s to
    connect). Compiled explicitly, a function is never compiled again because some import or setting
    has changed what JAX's own cache is keyed by.
    """
    compiled: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not compiled:
            compiled.append(jitted.lower(*args).compile())
            current().barrier(f"compiling {what}")
        return compiled[0](*args)

    return call


class OwnWishes:
    """Numbers on which one process settles at once: its own."""

    def settle(self, *numbers: int) -> tuple[int, ...]:
        """Return `numbers`."""
        return numbers

    def forget(self) -> None:
        """Nothing is left unsettled."""


class Wishes:
    """Numbers on which all processes settle, the largest of each, without waiting for each other.

    What is wished at one step is settled at the next: by then the devices have computed it, behind
    that step.

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
        """Wish for `numbers`, and get what was settled of the wishes one call before."""
        local = np.tile(np.asarray(numbers, np.int32), (jax.local_device_count(), 1))
        self._wished.append(self._largest(global_arrays(local, self._sharding)))
        if len(self._wished) < 2:
            return (0,) * len(numbers)
        return tuple(map(int, jax.device_get(self._wished.popleft())))

    def forget(self) -> None:
        """Drop what was wished and is not settled yet."""
        self._wished.clear()

"""A run of several processes: joining, agreeing, sharing, and arrays made of each one's rows.

Outside `joined`, and for a run of one process, every function here does the obvious thing for one
process without any communication.
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


class _Session:
    """This process among the others."""

    def __init__(self, cluster: Cluster, seconds: float):
        # JAX has no public name for its coordination client; Orbax takes it from here too.
        from jax._src import distributed

        self.cluster, self.seconds = cluster, seconds
        self.client = distributed.global_state.client
        self.watchdog = Watchdog(self.client, cluster.process, cluster.processes, seconds)
        self._count = 0
        self.put("who", whoami())

    @property
    def milliseconds(self) -> int:
        return int(1000 * self.seconds)

    def name(self, what: str) -> str:
        """A key used once; the same in all processes, which ask for names in the same order."""
        self._count += 1
        return f"{self._count}/{what}"

    def put(self, what: str, value: str) -> None:
        self.client.key_value_set(f"cem/{what}/{self.cluster.process}", value)

    def values(self, what: str) -> dict[int, str]:
        """What each process has put, by its number."""
        pairs = self.client.key_value_dir_get(f"cem/{what}")
        return {int(key.rpartition("/")[2]): value for key, value in pairs}


_session: _Session | None = None


@contextmanager
def joined(cluster: Cluster | None, minutes: float) -> Iterator[None]:
    """Within it, this process is one of those of `cluster`; None: the only one.

    Every wait for other processes ends after `minutes`. When one of them fails, all end with its
    exit status.

    Raises:
      RunFailed: not all processes have joined.
    """
    global _session
    if cluster is None:
        yield
        return
    seconds = 60 * minutes
    meet(cluster, seconds)
    _connect(cluster)
    _session = _Session(cluster, seconds)
    _session.watchdog.start()
    try:
        _require_processes(cluster)
        yield
        barrier("end")
    except SystemExit:  # all stop at the same step
        barrier("end")
        raise
    except BaseException as error:
        _fail(error)
        raise
    _session.watchdog.stop()


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


def _fail(error: BaseException) -> None:
    """Tell the others, and see to it that this process does not wait for them at its end."""
    code = 2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    watchdog = _session.watchdog
    watchdog.tell_failure(code, "; ".join(str(error).splitlines()) or type(error).__name__)

    def leave() -> None:
        watchdog.linger()
        end_at_once(code)

    atexit.register(leave)  # runs before JAX's own, which was registered earlier
    watchdog.stop()


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return _session is None or jax.process_index() == 0


def processes() -> int:
    """How many processes the run has."""
    return 1 if _session is None else _session.cluster.processes


def progress(where: str) -> None:
    """The run has got to `where`: the watchdog waits anew."""
    if _session is not None:
        _session.watchdog.progress(where)


def leave(code: int, line: str) -> NoReturn:
    """Say `line` and end this process at once, from any thread; the others end as well."""
    if _session is not None:
        _session.watchdog.abandon(line, code=code)
    complain(line)
    end_at_once(code)


def lost(error: BaseException) -> None:
    """To be called when a computation fails: where others may be the cause, ends this process.

    Says what failed and which processes are missing; does nothing for one process.
    """
    if _session is not None:
        traceback.print_exception(error)
        first = str(error).strip().split("\n")[0][:300]
        _session.watchdog.abandon(f"a computation failed: {first}", *_session.watchdog.missing())


def barrier(what: str) -> None:
    """Wait for all processes. Raises RunFailed, naming who did not come, after the time allowed."""
    if _session is None:
        return
    name = _session.name(what)
    _session.put(f"at/{name}", "")
    try:
        _session.client.wait_at_barrier(f"cem/{name}", _session.milliseconds)
    except jax.errors.JaxRuntimeError as error:
        there, known = _session.values(f"at/{name}"), _session.values("who")
        absent = [p for p in range(processes()) if p not in there]
        if not absent:
            raise RunFailed(f"barrier {what!r} failed: {error}") from error
        who = ", ".join(f"{p}: {known.get(p, 'unknown')}" for p in absent[:12])
        raise RunFailed(
            f"{numbered(absent)} did not come to {what!r} within {_session.seconds:.0f} s "
            f"(train.stall_minutes); {who}"
        ) from None


def shared(what: str, function: Callable[[], Any]) -> Any:
    """`function()` as the first process finds it, in all processes; its value must be plain JSON.

    Raises:
      UserError, RunFailed: as the first process did.
    """
    if _session is None:
        return function()
    key = f"cem/shared/{_session.name(what)}"
    if is_first():
        try:
            value = function()
        except (UserError, RunFailed) as error:
            kind = "user" if isinstance(error, UserError) else "failed"
            lines = str(error).splitlines()
            _session.client.key_value_set(key, json.dumps({"error": kind, "lines": lines}))
            raise
        _session.client.key_value_set(key, json.dumps({"value": value}))
        return value
    try:
        answer = json.loads(_session.client.blocking_key_value_get(key, _session.milliseconds))
    except jax.errors.JaxRuntimeError:
        raise RunFailed(f"the first process did not say {what!r} in time") from None
    if "error" in answer:
        lines = [f"first process: {line}" for line in answer["lines"]]
        raise UserError(*lines) if answer["error"] == "user" else RunFailed("; ".join(lines))
    return answer["value"]


def agree(facts: Callable[[], Mapping[str, Any]]) -> None:
    """Compare what `facts` returns in each process, by name; plain JSON.

    Raises:
      UserError: they are not the same in all of them; names facts and processes.
    """
    if _session is None:
        return
    _session.put("facts", json.dumps(dict(facts())))
    barrier("comparing configurations")
    shared("the comparison of configurations", lambda: _compare(_session.values("facts")))


def _compare(texts: Mapping[int, str]) -> None:
    facts = {process: json.loads(text) for process, text in sorted(texts.items())}
    known = _session.values("who")
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


def await_file(path: Path) -> None:
    """Returns when every process sees `path`, which the first one has written.

    Raises:
      UserError: it does not become visible here: the directory is not shared.
    """
    if _session is None:
        return
    barrier(f"writing {path.name}")
    deadline = time.monotonic() + min(_SEEN_SECONDS, _session.seconds)
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"{path}: process {_session.cluster.process} ({whoami()}) does not see what the "
                "first process wrote; --workdir must be a directory that all processes share"
            )
        time.sleep(0.2)


def local_rows(sharding: Sharding, rows: int) -> np.ndarray | None:
    """The rows, of a batch split by `sharding`, that this process's devices hold, in order.

    None: all of them, in a run of one process.
    """
    if _session is None:
        return None
    places = sharding.addressable_devices_indices_map((rows,))
    every = np.arange(rows)
    return np.unique(np.concatenate([every[index] for (index,) in places.values()]))


def global_arrays(local: Any, sharding: Sharding | None) -> Any:
    """Arrays over all devices, of which each process gives its `local_rows`."""
    if _session is None:
        return jax.device_put(local, sharding)
    devices = jax.device_count()
    share = len(local_rows(sharding, devices))

    def whole(array: np.ndarray) -> jax.Array:
        shape = (len(array) * devices // share, *array.shape[1:])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return jax.tree.map(whole, local)


def together(what: str, jitted: Any) -> Callable:
    """`jitted`, to be called with arguments of one kind, first run when all have compiled it.

    Compiling takes some processes longer than others, and a collective's partners do not wait for
    ever (Gloo: 30 s to connect).
    """
    if _session is None:
        return jitted
    compiled: list[Callable] = []

    def call(*args: Any) -> Any:
        if not compiled:
            compiled.append(jitted.lower(*args).compile())
            barrier(f"compiling {what}")
        return compiled[0](*args)

    return call


class Wishes:
    """Numbers on which all processes settle, the largest of each, without waiting for each other.

    What is wished at one step is settled at the next: by then the devices have computed it, behind
    that step. One process gets its own wishes at once.

    Args:
      mesh: of all devices.
    """

    def __init__(self, mesh: Mesh):
        self._wished: deque[Any] = deque()
        if _session is not None:
            self._sharding = NamedSharding(mesh, PartitionSpec(MESH_AXES))
            everywhere = NamedSharding(mesh, PartitionSpec())
            largest = jax.jit(lambda x: x.max(axis=0), out_shardings=everywhere)
            self._largest = together("what processes wish", largest)

    def settle(self, *numbers: int) -> tuple[int, ...]:
        """Wish for `numbers`, and get what was settled of the wishes one call before."""
        if _session is None:
            return numbers
        local = np.tile(np.asarray(numbers, np.int32), (jax.local_device_count(), 1))
        shape = (jax.device_count(), len(numbers))
        whole = jax.make_array_from_process_local_data(self._sharding, local, shape)
        self._wished.append(self._largest(whole))
        if len(self._wished) < 2:
            return (0,) * len(numbers)
        return tuple(map(int, jax.device_get(self._wished.popleft())))

    def forget(self) -> None:
        """Drop what was wished and is not settled yet."""
        self._wished.clear()

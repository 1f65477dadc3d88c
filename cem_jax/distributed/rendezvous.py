"""A rendezvous of all processes at the coordinator, before JAX connects them.

JAX aborts a process whose partners do not appear, without naming them. So process 0 first listens
at the coordinator's address itself, until every other has sent its number, host and process id;
then it frees the port for JAX. Messages are JSON lines.
"""

import contextlib
import json
import os
import socket
import time

from cem_jax.distributed.cluster import Cluster
from cem_jax.errors import RunFailed

_HELLO = "cem_jax"
_LONGEST = 1 << 16  # bytes of a message
_RETRY_SECONDS = 0.3


def whoami() -> str:
    """Return this process's host and process id, for messages."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def meet(cluster: Cluster, seconds: float) -> None:
    """Wait until all processes of `cluster` have joined.

    Raises:
      RunFailed: after `seconds`, naming the missing processes; or two processes have the same
        number, or disagree on the number of processes.
    """
    deadline = time.monotonic() + seconds
    if cluster.process == 0:
        _receive_all(cluster, deadline, seconds)
    else:
        _report(cluster, deadline, seconds)


def _receive_all(cluster: Cluster, deadline: float, seconds: float) -> None:
    present: dict[int, tuple[socket.socket, str]] = {}
    problem = None
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(_listen(cluster))
        while len(present) < cluster.processes - 1 and problem is None:
            try:
                listener.settimeout(max(deadline - time.monotonic(), 0.01))
                connection, address = listener.accept()
            except TimeoutError:
                problem = _missing(cluster, present, seconds)
                break
            open_sockets.enter_context(connection)
            hello = _read_hello(connection)
            if hello is not None:
                problem = _admit(cluster, present, connection, hello, address[0])
        listener.close()  # frees the port for JAX
        answer = {"problem": problem}
        for connection, _ in present.values():
            with contextlib.suppress(OSError):
                _send(connection, answer)
        if problem is None:
            _await_closing(present)
    if problem is not None:
        raise RunFailed(problem)


def _listen(cluster: Cluster) -> socket.socket:
    port = int(cluster.coordinator.rpartition(":")[2])
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise RunFailed(
            f"process 0 cannot listen at port {port} of {cluster.coordinator}: {error.strerror}; "
            "another run on this machine may use it"
        ) from None


def _read_hello(connection: socket.socket) -> dict | None:
    """Return the message of a process; None for anything else that connects."""
    try:
        connection.settimeout(5)
        hello = _receive(connection)
        connection.settimeout(None)
    except (OSError, ValueError):
        return None
    return hello if isinstance(hello, dict) and hello.get("hello") == _HELLO else None


def _admit(cluster, present, connection, hello, address) -> str | None:
    """Add a process to those present, or return why not."""
    index, who = hello["process"], hello["who"]
    if hello["processes"] != cluster.processes:
        problem = (
            f"process {index} ({who}) says there are {hello['processes']} processes, process 0 "
            f"({whoami()}) says {cluster.processes} ({cluster.source})"
        )
    elif index in present and present[index][1] != who:
        problem = f"process {index} joined twice: {present[index][1]} and {who} at {address}"
    else:  # the same process may have reconnected
        present[index] = connection, who
        return None
    with contextlib.suppress(OSError):
        _send(connection, {"problem": problem})
    return problem


def _missing(cluster: Cluster, present: dict, seconds: float) -> str:
    absent = [index for index in range(1, cluster.processes) if index not in present]
    return (
        f"{numbered(absent)} of {cluster.processes} did not join within {seconds:.0f} s "
        f"(train.stall_minutes) at {cluster.coordinator}; {len(present) + 1} did"
    )


def _await_closing(present: dict) -> None:
    """Let the others close first: the side that closes first keeps the port busy for a while."""
    for connection, _ in present.values():
        with contextlib.suppress(OSError):
            connection.settimeout(2)
            connection.recv(1)


def _report(cluster: Cluster, deadline: float, seconds: float) -> None:
    host, _, port = cluster.coordinator.rpartition(":")
    hello = {
        "hello": _HELLO,
        "process": cluster.process,
        "processes": cluster.processes,
        "who": whoami(),
    }
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            address = host.strip("[]"), int(port)
            with socket.create_connection(address, timeout=min(left, 10)) as connection:
                _send(connection, hello)
                # Process 0 gives up first and names the missing processes.
                connection.settimeout(max(deadline - time.monotonic(), 0.01) + 5)
                answer = _receive(connection)
        except (OSError, ValueError) as error:  # not listening, or not in DNS, yet
            reason = str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        if answer["problem"] is not None:
            raise RunFailed(answer["problem"])
        return
    raise RunFailed(
        f"process 0 did not let process {cluster.process} ({whoami()}) join at "
        f"{cluster.coordinator} within {seconds:.0f} s (train.stall_minutes): {reason}"
    )


def numbered(processes: list[int]) -> str:
    """Format process numbers: `process 3`, `processes 1, 2 and 5 more`."""
    shown = ", ".join(map(str, processes[:12]))
    more = f" and {len(processes) - 12} more" if len(processes) > 12 else ""
    return f"process{'es' * (len(processes) != 1)} {shown}{more}"


def _send(connection: socket.socket, message: dict) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict:
    """Receive a message. Raises OSError or ValueError on a closed connection or invalid data."""
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(4096)
        if not part or len(data) > _LONGEST:
            raise ConnectionError("the connection was closed")
        data += part
    return json.loads(data)

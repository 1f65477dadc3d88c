"""Find the processes of a run: from flags and CEM_* variables, SLURM, Kubernetes or a TPU.

`jax.distributed.initialize` detects SLURM, Open MPI, Kubernetes and TPUs too, but silently: if it
recognises nothing, or only half of a setting, each process of a job trains alone, on the same data,
and nobody notices. Here any sign of several processes is believed, and whatever is then missing or
contradictory is an error that names the variable. CEM_PROCESSES=1 says that this process is the
whole run, wherever it is started.
"""

import importlib.util
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cem_jax.errors import UserError

_TPU_PORT = 8482  # libtpu uses 8471 to 8479
_METADATA_SECONDS = 5
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Cluster:
    """The place of one process among those of a run."""

    coordinator: str  # host:port where process 0 listens
    processes: int
    process: int
    source: str  # where this was found, for messages
    local_devices: tuple[int, ...] | None = None  # among the machine's GPUs; None: all


def find_cluster(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Cluster | None:
    """Return this process's place in the run, or None if it is the only process.

    Arguments take precedence over CEM_COORDINATOR, CEM_PROCESSES and CEM_PROCESS, and these over
    everything else.

    Raises:
      UserError: the environment indicates several processes, but its settings are incomplete or
        impossible.
    """
    environ = os.environ if environ is None else environ
    found = (
        _explicit(coordinator, processes, process, environ)
        or _slurm(environ)
        or _tpu_variables(environ)
        or _kubernetes(environ)
        or _mpi(environ)
        or _tpu_metadata(environ)
    )
    return None if found is None or found.processes == 1 else found


def _explicit(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    environ: Mapping[str, str],
) -> Cluster | None:
    count = _number("CEM_PROCESSES", environ) if processes is None else processes
    index = _number("CEM_PROCESS", environ) if process is None else process
    address = coordinator or environ.get("CEM_COORDINATOR") or None
    if count is None and index is None and address is None:
        return None
    if count == 1:
        return Cluster("", 1, 0, "CEM_PROCESSES")
    if index is None:  # a scheduler may number the processes
        index = _number("JOB_COMPLETION_INDEX", environ)
    if index is None:
        index = _number("SLURM_PROCID", environ)
    settings = {
        "--coordinator or CEM_COORDINATOR (HOST:PORT of process 0)": address,
        "--processes or CEM_PROCESSES (their number)": count,
        "--process or CEM_PROCESS (this one's index, from 0)": index,
    }
    missing = [name for name, value in settings.items() if value is None]
    if missing:
        raise UserError(*(f"several processes: {name} is not set" for name in missing))
    return _checked(Cluster(address, count, index, "flags and CEM_* variables"))


def _checked(cluster: Cluster) -> Cluster:
    problems = []
    host, _, port = cluster.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        problems.append(f"coordinator: expected HOST:PORT, got {cluster.coordinator!r}")
    if cluster.processes < 1:
        problems.append(f"processes: must be at least 1, not {cluster.processes}")
    elif not 0 <= cluster.process < cluster.processes:
        problems.append(
            f"process: {cluster.process} is not one of the {cluster.processes} processes, "
            f"which are numbered from 0 to {cluster.processes - 1}"
        )
    if problems:
        raise UserError(*(f"{problem} ({cluster.source})" for problem in problems))
    return cluster


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    job = _number("SLURM_JOB_ID", environ)
    if job is None:
        return None
    count = _number("SLURM_STEP_NUM_TASKS", environ)
    if count is None:  # the batch script itself, or a shell in salloc
        tasks = _number("SLURM_NTASKS", environ) or 1
        if tasks > 1:
            raise UserError(
                f"SLURM_NTASKS={tasks}, but srun did not start this process: run `srun cem train "
                "…`, or set CEM_PROCESSES=1 to train alone"
            )
        return None
    nodes, index = environ.get("SLURM_STEP_NODELIST", ""), _number("SLURM_PROCID", environ)
    if count > 1 and (not nodes or index is None):
        raise UserError("SLURM: SLURM_STEP_NODELIST or SLURM_PROCID is not set in this step")
    # Above the ephemeral ports; job ids differ between the tasks of an array.
    step = _number("SLURM_STEP_ID", environ) or 0
    port = 61440 + (job + 64 * step) % 4096
    devices = _slurm_devices(environ) if count > 1 else None
    address = f"{first_host(nodes)}:{port}" if count > 1 else ""
    return Cluster(address, count, index or 0, "SLURM", devices)


def first_host(nodes: str) -> str:
    """Return the first name of a SLURM node list: `gpu[003-007,9],login` gives `gpu003`.

    Each pair of brackets gives its first number: `rack[1-2]node[3-4]` gives `rack1node3`.
    """
    whole = re.match(r"(\[[^]]*\]|[^,[])*", nodes)[0]  # up to a comma outside brackets
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", whole)


def _slurm_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return this task's share of its node's GPUs, or None if it only sees its own."""
    tasks = _tasks_here(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = _number("SLURM_GPUS_ON_NODE", environ) or 0
    else:
        gpus = len(visible.split(",")) if visible else 0
    if tasks == 1 or gpus < 2:  # it is the only task, or SLURM assigned its GPUs
        return None
    if gpus % tasks:
        raise UserError(
            f"SLURM: {tasks} tasks on a node share {gpus} GPUs, which does not divide; change "
            "--ntasks-per-node or --gpus-per-node"
        )
    share, local = gpus // tasks, _number("SLURM_LOCALID", environ) or 0
    return tuple(range(local * share, (local + 1) * share))


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Read SLURM_STEP_TASKS_PER_NODE, such as `4(x2),1`: four on each of two nodes, then one."""
    node = _number("SLURM_NODEID", environ) or 0
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        numbers = [int(number) for number in _NUMBER.findall(part)]
        counts += numbers[:1] * (numbers[1] if len(numbers) > 1 else 1)
    return counts[node] if node < len(counts) else 1


def _tpu_variables(environ: Mapping[str, str]) -> Cluster | None:
    """Read the variables of GKE's TPU pods: host names, and MEGASCALE_* for several slices."""
    names = environ.get("TPU_WORKER_HOSTNAMES", "")
    hosts = [name for name in names.split(",") if name]
    slices = _number("MEGASCALE_NUM_SLICES", environ) or 1
    if not hosts:
        if slices > 1:
            raise UserError(f"MEGASCALE_NUM_SLICES={slices}, but TPU_WORKER_HOSTNAMES is not set")
        return None
    if len(hosts) * slices == 1:
        return Cluster("", 1, 0, "TPU_WORKER_HOSTNAMES")
    worker = _number("TPU_WORKER_ID", environ)
    if worker is None:
        raise UserError(f"TPU_WORKER_HOSTNAMES names {len(hosts)} hosts; TPU_WORKER_ID is not set")
    return _tpu_cluster(hosts, worker, environ, "TPU_WORKER_HOSTNAMES")


def _tpu_cluster(hosts: list[str], worker: int, values: Mapping[str, str], source: str) -> Cluster:
    slices = _number("MEGASCALE_NUM_SLICES", values) or 1
    slice_index = _number("MEGASCALE_SLICE_ID", values) or 0
    first = values.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0]
    if slices > 1 and not first:
        raise UserError(f"{slices} TPU slices, but MEGASCALE_COORDINATOR_ADDRESS is not set")
    address = f"{first if slices > 1 else hosts[0]}:{_TPU_PORT}"
    index = slice_index * len(hosts) + worker
    return _checked(Cluster(address, slices * len(hosts), index, source))


def _kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    """Refuse an indexed job without settings: its pods are numbered, but not counted."""
    index = _number("JOB_COMPLETION_INDEX", environ)
    if index is None:
        return None
    raise UserError(
        f"JOB_COMPLETION_INDEX={index}: one pod of an indexed job, but CEM_PROCESSES is not set; "
        "set it and CEM_COORDINATOR (as launch/kubernetes does), or CEM_PROCESSES=1 if every pod "
        "is a run of its own"
    )


def _mpi(environ: Mapping[str, str]) -> Cluster | None:
    count = _number("OMPI_COMM_WORLD_SIZE", environ) or 1
    if count == 1:
        return None
    raise UserError(
        f"OMPI_COMM_WORLD_SIZE={count}: set CEM_COORDINATOR=HOST:PORT, CEM_PROCESSES={count} and "
        "CEM_PROCESS=$OMPI_COMM_WORLD_RANK for each process"
    )


def _tpu_metadata(environ: Mapping[str, str]) -> Cluster | None:
    """Read the workers of a Cloud TPU VM from its metadata server."""
    if environ.get("TPU_SKIP_MDS_QUERY") or not _may_use_tpu(environ):
        return None
    endpoints = _metadata("worker-network-endpoints", environ)
    worker = _metadata("agent-worker-number", environ)
    if not endpoints or worker is None:
        return None
    # Either names, or name:id:address triples.
    hosts = [endpoint.split(":")[-1] for endpoint in endpoints.split(",")]
    lines = (line.partition(":") for line in (_metadata("tpu-env", environ) or "").splitlines())
    values = {name.strip(): value.strip().strip("'") for name, _, value in lines}
    return _tpu_cluster(hosts, int(worker), values, "TPU metadata")


def _may_use_tpu(environ: Mapping[str, str]) -> bool:
    platforms = environ.get("JAX_PLATFORMS", "")
    chips = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    wanted = not platforms or "tpu" in platforms.split(",")
    return chips and wanted and importlib.util.find_spec("libtpu") is not None


def _metadata(name: str, environ: Mapping[str, str]) -> str | None:
    """Return an attribute of this virtual machine, or None if it does not exist."""
    host = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
            return answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        problem = str(error)
    except OSError as error:
        problem = str(error)
    raise UserError(
        f"this machine has TPU chips, but its metadata server does not list the workers "
        f"({problem}); set CEM_PROCESSES=1 if there is only this one, or CEM_COORDINATOR, "
        "CEM_PROCESSES and CEM_PROCESS"
    )


def _number(name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise UserError(f"{name}: expected a number, got {text!r}")
    return int(text)

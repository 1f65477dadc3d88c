"""Finding the processes of a run in the environment, and their rendezvous."""

import http.server
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from process_group import free_port

from cem_jax.distributed import cluster
from cem_jax.distributed.cluster import Cluster, find_cluster, first_host
from cem_jax.distributed.rendezvous import meet
from cem_jax.errors import RunFailed, UserError

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
EXPLICIT = {"CEM_COORDINATOR": "a:1", "CEM_PROCESSES": "2", "CEM_PROCESS": "1"}
HOSTS = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_WORKER_ID": "2"}
SLICES = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "first:8080",
}


def found(environ):
    place = find_cluster(environ=environ)
    return place and (place.coordinator, place.processes, place.process, place.local_devices)


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        ({}, None),
        (EXPLICIT, ("a:1", 2, 1, None)),
        (EXPLICIT | {"CEM_PROCESSES": "1"}, None),
        (SLURM | {"CEM_PROCESSES": "1"}, None),
        (SLURM | EXPLICIT, ("a:1", 2, 1, None)),
        ({**EXPLICIT, "CEM_PROCESS": "", "JOB_COMPLETION_INDEX": "0"}, ("a:1", 2, 0, None)),
        (SLURM, ("gpu003:62055", 8, 5, None)),
        (SLURM | {"SLURM_GPUS_ON_NODE": "8"}, ("gpu003:62055", 8, 5, (2, 3))),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("gpu003:62055", 8, 5, (1,))),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, ("gpu003:62055", 8, 5, None)),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "8"},
            ("gpu003:62055", 8, 5, None),
        ),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_GPUS_ON_NODE": "8"},
            ("gpu003:62055", 8, 5, None),
        ),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, None),
        (HOSTS, ("t0:8482", 4, 2, None)),
        (HOSTS | SLICES, ("first:8482", 8, 6, None)),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "JOB_COMPLETION_INDEX": "3"}, None),
        (HOSTS | {"JOB_COMPLETION_INDEX": "2"}, ("t0:8482", 4, 2, None)),
    ],
)
def test_the_environment_is_read(environ, want):
    assert found(environ) == want


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"CEM_PROCESSES": "2"}, "CEM_COORDINATOR (HOST:PORT of process 0) is not set"),
        ({"CEM_PROCESSES": "2"}, "CEM_PROCESS (this one's index, from 0) is not set"),
        (EXPLICIT | {"CEM_PROCESSES": "two"}, "CEM_PROCESSES: expected a number, got 'two'"),
        (EXPLICIT | {"CEM_PROCESS": "2"}, "2 is not one of the 2 processes"),
        (EXPLICIT | {"CEM_COORDINATOR": "a"}, "expected HOST:PORT, got 'a'"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, "srun did not start this process"),
        (SLURM | {"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        (SLURM | {"SLURM_GPUS_ON_NODE": "6"}, "4 tasks on a node share 6 GPUs"),
        ({"JOB_COMPLETION_INDEX": "1"}, "CEM_PROCESSES is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "CEM_PROCESS=$OMPI_COMM_WORLD_RANK"),
        (HOSTS | {"TPU_WORKER_ID": ""}, "TPU_WORKER_ID is not set"),
        ({"MEGASCALE_NUM_SLICES": "2"}, "TPU_WORKER_HOSTNAMES is not set"),
    ],
)
def test_several_processes_are_never_taken_for_one(environ, message):
    with pytest.raises(UserError) as error:
        find_cluster(environ=environ)
    assert message in str(error.value)


def test_flags_win():
    place = find_cluster("b:2", 3, 0, EXPLICIT)
    assert (place.coordinator, place.processes, place.process) == ("b:2", 3, 0)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[003-007,9],x", "gpu003"), ("a,b[1-2]", "a"),
     ("r[1,3]n", "r1n"), ("", ""), ("rack[1-2]node[3-4]", "rack1node3"),
     ("rack[01,3]node[08-10,12]-ib,x[1-2]", "rack01node08-ib"), ("a[2]b[3-4,7]c[1]", "a2b3c1"),
     ("gpu-a[007]", "gpu-a007"), ("n1.example.org,n[2-3].example.org", "n1.example.org"),
     ("n[2-3].example.org", "n2.example.org"), ("r[1-2]", "r1"), ("[10-12]", "10")],
)  # fmt: skip
def test_first_host_of_a_slurm_node_list(nodes, first):
    assert first_host(nodes) == first


class _Metadata(http.server.BaseHTTPRequestHandler):
    values: dict[str, str]

    def do_GET(self):
        value = self.values.get(self.path.rpartition("/")[2])
        self.send_response(200 if value is not None else 404)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata(monkeypatch):
    """Return a function that answers like the metadata server of a TPU VM."""
    monkeypatch.setattr(cluster, "_may_use_tpu", lambda environ: True)
    _Metadata.values = {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}

        def ask(**values):
            _Metadata.values = {name.replace("_", "-"): value for name, value in values.items()}
            return found(address)

        yield ask
        server.shutdown()
        thread.join()


def test_the_workers_of_a_tpu_vm(metadata):
    triples = "unknown:unknown:10.0.0.1,unknown:unknown:10.0.0.2"
    assert metadata(worker_network_endpoints=triples, agent_worker_number="1") == (
        "10.0.0.1:8482", 2, 1, None,
    )  # fmt: skip
    assert metadata(worker_network_endpoints="10.0.0.1", agent_worker_number="0") is None
    assert metadata() is None
    slices = "\n".join(f"{name}: '{value}'" for name, value in SLICES.items())
    assert metadata(worker_network_endpoints=triples, agent_worker_number="1", tpu_env=slices) == (
        "first:8482",
        4,
        3,
        None,
    )


def test_a_tpu_vm_whose_metadata_server_is_silent(monkeypatch):
    monkeypatch.setattr(cluster, "_may_use_tpu", lambda environ: True)
    with pytest.raises(UserError, match="CEM_PROCESSES=1 if there is only this one"):
        find_cluster(environ={"GCE_METADATA_IP": f"127.0.0.1:{free_port()}"})


def meeting(*places, seconds=10.0):
    """Return for each process the result of `meet`: None, or the error's message."""

    def join(place):
        try:
            meet(place, seconds)
        except RunFailed as error:
            return str(error)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(join, places))


def places(count, port=None):
    port = port or free_port()
    return [Cluster(f"127.0.0.1:{port}", count, index, "test") for index in range(count)]


def test_processes_meet_and_free_the_port():
    all_of_them = places(3)
    assert meeting(*all_of_them[::-1]) == [None] * 3
    port = int(all_of_them[0].coordinator.rpartition(":")[2])
    socket.create_server(("127.0.0.1", port)).close()


def test_missing_processes_are_named():
    first, _, third, _ = places(4)
    told = meeting(first, third, seconds=1)
    assert told[0] == told[1]
    assert "processes 1, 3 of 4 did not join within 1 s" in told[0]
    assert "did not let process 2" in meeting(third, seconds=0.5)[0]


def test_processes_that_count_differently():
    port = free_port()
    told = meeting(places(2, port)[0], places(3, port)[1])
    assert all("says there are 3 processes" in text for text in told)


def test_a_stranger_at_the_port_is_ignored():
    first, second = places(2)
    port = int(first.coordinator.rpartition(":")[2])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, first, 20)
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n")
                break
            except ConnectionRefusedError:
                pass
        meet(second, 20)
        assert waiting.exception() is None


def test_a_port_in_use():
    first, _ = places(2)
    port = int(first.coordinator.rpartition(":")[2])
    with socket.create_server(("", port)):
        assert "another run on this machine may use it" in meeting(first)[0]

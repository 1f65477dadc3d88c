"""Hardware that is not present: devices to compile for, and their capacities.

    v5e:16x16     TPUs, by generation and shape, as libtpu names them; needs libtpu
    4*v5e:16x16   four such slices, joined by the data-center network
    H100:16       16 GPUs, eight per host; needs JAX's CUDA plugin, but no GPU or driver
    cpu:8         this machine's processor, as 8 devices

JAX itself then runs on the CPU: call `open_topology` before any computation.
"""

import heapq
import importlib.util
import itertools
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from cem_jax.errors import UserError
from cem_jax.sharding.mesh import slice_of

GIB = 2**30
GPUS_IN_HOST = 8


class Capacity(NamedTuple):
    """Capacities of one JAX device; None if unknown."""

    memory: float | None  # bytes that a program may use
    bandwidth: float | None  # of main memory, bytes per second
    link: float | None  # bytes per second that a device sends in a ring
    far_link: float | None = None  # the same between TPU slices or GPU hosts, over their network
    flops: float | None = None  # peak, if cem_jax.train.flops has none
    note: str = ""  # a caveat on these figures


class Topology(NamedTuple):
    """Devices of one kind to compile for."""

    name: str
    platform: str  # tpu, cuda or cpu, for `lower(lowering_platforms=…)`
    devices: list[jax.Device]
    capacity: Capacity

    @property
    def kind(self) -> str:
        """`device_kind` of its devices."""
        return self.devices[0].device_kind

    def neighbourhood(self, device: jax.Device) -> int:
        """Return the TPU slice or GPU host within which `device` has fast links."""
        return device.id // GPUS_IN_HOST if self.platform == "cuda" else slice_of(device)


class _Tpu(NamedTuple):
    dimensions: int
    longest: int  # longest side
    chips: int  # maximum number
    capacity: Capacity
    options: dict[str, Any]


_UNKNOWN = Capacity(None, None, None)
# Memory: the limit in libtpu's message when a program needs more. Bandwidth and links:
# docs.cloud.google.com/tpu/docs, the page of each version. A ring runs along one dimension of the
# torus in both directions: the chip's one-way link rate, divided by 2 or 3 dimensions. A device is
# a chip, except for TPU7x, where it is one of two cores. Between slices: a chip's share of the
# pod's data-center network, if the page gives it.
_TPUS = {
    "v2": _Tpu(2, 16, 256, _UNKNOWN, {}),
    "v3": _Tpu(2, 32, 1024, _UNKNOWN, {}),
    "v4": _Tpu(3, 16, 4096, Capacity(30.75 * GIB, 1200e9, 100e9), {"chip_config_name": "megacore"}),
    "v5e": _Tpu(2, 16, 256, Capacity(15.75 * GIB, 819e9, 100e9, 3.125e9), {}),
    "v5p": _Tpu(3, 28, 8960, Capacity(95.73 * GIB, 2765e9, 200e9), {}),
    "v6e": _Tpu(2, 16, 256, Capacity(31.24 * GIB, 1638e9, 200e9, 12.5e9), {}),
    "tpu7x": _Tpu(3, 48, 9216, Capacity(94.74 * GIB, 7380e9 / 2, 100e9), {}),
}
# As XLA describes them: name, bytes of memory, bytes per second. NVLink one way, and one 400 Gb/s
# network adapter per GPU between hosts, as in NVIDIA's DGX.
_GPUS = {
    "H100": ("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000),
    "H200": ("NVIDIA H200", 151_397_597_184, 4_800_000_000_000),
}
_NVLINK, _ADAPTER = 450e9, 50e9
_GPU_TARGET = """
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_address_bits: 64
  name: "{name}" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
# For libtpu without a TPU: do not look for one, and allow other processes to load libtpu.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
# CPUs vary too much for a table: these figures only make programs comparable.
_NOMINAL = Capacity(
    None, 20e9, 10e9, flops=100e9, note="nominal figures of a CPU: they compare programs only"
)
KNOWN = (
    "known: "
    + ", ".join(f"{name}:{'x'.join('ABC'[: tpu.dimensions])}" for name, tpu in _TPUS.items())
    + " (TPU chips along each side, such as v5e:4x4; 2*v5e:4x4 for two slices), "
    + ", ".join(f"{name}:N" for name in _GPUS)
    + " and cpu:N"
)


def open_topology(name: str) -> Topology:
    """Return the devices that `name` describes; set the environment that their compiler needs.

    Raises UserError if there is no such topology or its compiler is not installed.
    """
    kind, _, size = name.partition(":")
    slices, several, kind = kind.rpartition("*")
    if kind in _TPUS:
        count = _count(name, slices, "of slices before the *") if several else 1
        return _tpu(name, kind, size, count)
    if kind != "cpu" and kind not in _GPUS:
        raise _wrong(name, f"no such device as {kind!r}" if kind else "no such topology")
    if several:
        raise _wrong(name, f"only TPUs have slices; write {kind}: and the total number of devices")
    count = _count(name, size)
    return _cpu(name, count) if kind == "cpu" else _gpu(name, kind, count)


def _wrong(name: str, why: str, known: str = KNOWN) -> UserError:
    return UserError(f"--topology {name}: {why}; {known}")


def _count(name: str, size: str, what: str = "of devices after the colon") -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", size):
        raise _wrong(name, f"expected a number {what}")
    return int(size)


def _cpu(name: str, count: int) -> Topology:
    _compute_on_cpu(count)
    found = jax.devices("cpu")
    if len(found) < count:
        raise RuntimeError(f"JAX has started already, with {len(found)} CPU devices, not {count}")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / count
    return Topology(name, "cpu", found[:count], _NOMINAL._replace(memory=memory))


def _compute_on_cpu(devices: int = 1) -> None:
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # a backend is running already, and may suffice
        pass


def _tpu(name: str, kind: str, size: str, slices: int) -> Topology:
    known = _TPUS[kind]
    _check_shape(name, kind, size, known)
    library = os.environ.get("TPU_LIBRARY_PATH")
    if library and not Path(library).exists():
        raise UserError(f"TPU_LIBRARY_PATH: {library} does not exist")
    if not library and not _installed("libtpu"):
        raise UserError(
            f"--topology {name}: needs libtpu, the TPUs' compiler: pip install 'cem_jax[tpu]' "
            "(or unpack its wheel anywhere and set its libtpu.so for this command only: "
            "TPU_LIBRARY_PATH=FILE cem compile …)"
        )
    for variable, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    _compute_on_cpu()
    options = known.options | ({"num_slices": slices} if slices > 1 else {})
    try:
        found = topologies.get_topology_desc(f"{kind}:{size}", platform="tpu", **options).devices
    except Exception as error:  # libtpu raises several types
        said = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"--topology {name}: {said}") from None
    return Topology(name, "tpu", found, known.capacity)


def _check_shape(name: str, kind: str, size: str, known: _Tpu) -> None:
    """Refuse shapes that no pod has; libtpu accepts them, but its compiler crashes on some."""
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", size):
        letters, example = ("x".join(side[: known.dimensions]) for side in ("ABC", "444"))
        raise _wrong(name, f"expected {kind}:{letters}", f"such as {kind}:{example}")
    sides = tuple(int(side) for side in size.split("x"))
    if len(sides) != known.dimensions:
        why = f"{kind} has {known.dimensions} dimensions, not {len(sides)}"
    elif max(sides) > known.longest or math.prod(sides) > known.chips:
        why = f"{kind} has at most {known.chips} chips and {known.longest} per side"
    elif not all(map(_fills_hosts, range(known.dimensions), sides)):
        why = "a host has 2x2 chips, so the first two sides must be even, or 1"
    else:
        return
    raise _wrong(name, why, _near(name, sides, known))


def _fills_hosts(axis: int, side: int) -> bool:
    """Return whether whole hosts fit along a side: a host is 2 chips wide and high, 1 deep."""
    return axis > 1 or side == 1 or side % 2 == 0


def _near(name: str, sides: tuple[int, ...], known: _Tpu) -> str:
    """Return a hint with the generation's valid shapes nearest to `sides`."""
    wanted = (*sides, 1, 1)[: known.dimensions]
    allowed = (
        [side for side in range(1, known.longest + 1) if _fills_hosts(axis, side)]
        for axis in range(known.dimensions)
    )
    shapes = (shape for shape in itertools.product(*allowed) if math.prod(shape) <= known.chips)
    away = lambda shape: sum(abs(side - near) for side, near in zip(wanted, shape, strict=True))
    nearest = heapq.nsmallest(4, shapes, key=away)
    kind = name.partition(":")[0]
    return "nearest: " + ", ".join(f"{kind}:{'x'.join(map(str, shape))}" for shape in nearest)


def _gpu(name: str, kind: str, count: int) -> Topology:
    if count > GPUS_IN_HOST and count % GPUS_IN_HOST:
        raise _wrong(
            name,
            f"more than {GPUS_IN_HOST} GPUs come in hosts of {GPUS_IN_HOST}",
        )
    if not any(_installed(f"jax_plugins.xla_cuda{version}") for version in (13, 12)):
        raise UserError(
            f"--topology {name}: needs JAX's CUDA plugin (no GPU or driver): "
            "pip install 'cem_jax[cuda]'"
        )
    flags = ["--xla_gpu_autotune_level=0"]  # autotuning would run candidates on the GPU
    toolkit = _cuda_toolkit()
    if toolkit:
        flags.append(f"--xla_gpu_cuda_data_dir={toolkit}")
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")]).strip()
    _compute_on_cpu()
    device, memory, bandwidth = _GPUS[kind]
    hosts = max(1, count // GPUS_IN_HOST)
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=_GPU_TARGET.format(name=device, memory=memory, bandwidth=bandwidth),
        topology=f"1x{hosts}x{count // hosts}",
    ).devices
    share = _share_of_memory()
    note = (
        f"JAX takes {share:.0%} of a GPU's {memory / GIB:.1f} GiB (XLA_PYTHON_CLIENT_MEM_FRACTION)"
    )
    return Topology(
        name, "cuda", found, Capacity(memory * share, bandwidth, _NVLINK, _ADAPTER, note=note)
    )


def _share_of_memory() -> float:
    text = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UserError(
            f"XLA_PYTHON_CLIENT_MEM_FRACTION: expected a number between 0 and 1, got {text!r}"
        )
    return share


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _cuda_toolkit() -> Path | None:
    """Return the folder of CUDA's compilers among the installed packages, or None."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    folders = (Path(place) / "cu13" for place in places or ())
    return next((folder for folder in folders if (folder / "bin" / "ptxas").exists()), None)

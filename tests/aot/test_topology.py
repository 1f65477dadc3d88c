"""Names of topologies; `test_compile.py` compiles for them."""

import importlib.util

import pytest

from cem_jax.aot import topology
from cem_jax.errors import UserError


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(topology, "_installed", lambda module: False)


@pytest.fixture(params=[True, False], ids=["libtpu", "no libtpu"])
def libtpu(request, nothing_installed, monkeypatch, tmp_path):
    """Pretend that libtpu is installed; it must not be loaded."""
    if request.param:
        (tmp_path / "libtpu.so").touch()
        monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))


def message_of(name):
    with pytest.raises(UserError) as caught:
        topology.open_topology(name)
    (message,) = caught.value.messages
    assert message.startswith(f"--topology {name}: ")
    return message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "no such topology"),
        ("v9 4x4", "no such device as 'v9 4x4'"),
        ("v99:4x4", "no such device as 'v99'"),
        ("V5E:4x4", "no such device as 'V5E'"),
        ("2*v99:4x4", "no such device as 'v99'"),
        ("4*cpu:8", "only TPUs have slices; write cpu: and the total number of devices"),
        ("2*H100:8", "only TPUs have slices; write H100: and the total number of devices"),
        ("h100:8", "no such device as 'h100'"),
        ("1*2*v5e:4x4", "expected a number of slices before the *"),
        ("0*v5e:4x4", "expected a number of slices before the *"),
        ("*v5e:4x4", "expected a number of slices before the *"),
        ("H100", "expected a number of devices"),
        ("H100:0", "expected a number of devices"),
        ("H200:12", "more than 8 GPUs come in hosts of 8"),
        ("cpu:many", "expected a number of devices"),
    ],
)
def test_wrong_names(name, words, libtpu):
    message = message_of(name)
    assert words in message
    for known in ("v4:AxBxC", "v5e:AxB", "v5p:AxBxC", "v6e:AxB", "H100:N", "H200:N", "cpu:N"):
        assert known in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5e", "expected v5e:AxB; such as v5e:4x4"),
        ("v5e:4x", "expected v5e:AxB"),
        ("v5e:0x4", "expected v5e:AxB"),
        ("v2:0x2", "expected v2:AxB"),
        ("v5p:", "expected v5p:AxBxC; such as v5p:4x4x4"),
        ("v5e:4x4x4", "v5e has 2 dimensions, not 3; nearest: v5e:4x4"),
        ("v5p:4x4", "v5p has 3 dimensions, not 2; nearest: v5p:4x4x1"),
        ("v3:4x4x4", "v3 has 2 dimensions, not 3"),
        ("2*v5e:4", "v5e has 2 dimensions, not 1; nearest: 2*v5e:4x1"),
        ("v5e:64x64", "at most 256 chips and 16 per side; nearest: v5e:16x16"),
        ("v5p:28x28x28", "at most 8960 chips and 28 per side; nearest: v5p:"),
        (
            "v5e:3x5",
            "first two sides must be even, or 1; nearest: v5e:2x4, v5e:2x6, v5e:4x4, v5e:4x6",
        ),
        ("v4:2x3x3", "first two sides must be even, or 1; nearest: v4:2x2x3, v4:2x4x3"),
        ("4*v6e:1x3", "first two sides must be even, or 1; nearest: 4*v6e:1x2, 4*v6e:1x4"),
    ],
)
def test_shapes_that_do_not_exist(name, words, libtpu):
    message = message_of(name)
    assert words in message
    assert "H100" not in message  # not about other devices


@pytest.mark.parametrize(
    ("name", "extra"), [("v5e:4x4", "cem_jax[tpu]"), ("v2:2x2", "cem_jax[tpu]"), ("H100:8", "cuda")]
)
def test_missing_compilers(name, extra, nothing_installed):
    with pytest.raises(UserError, match="pip install") as caught:
        topology.open_topology(name)
    assert extra in str(caught.value)


def test_a_missing_library(monkeypatch, tmp_path):
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    with pytest.raises(UserError, match=r"TPU_LIBRARY_PATH: .*libtpu\.so does not exist"):
        topology.open_topology("v5e:4x4")


def test_installed_accepts_missing_packages():
    assert topology._installed("jax.numpy")
    assert not topology._installed("no_such_package.inside")
    assert importlib.util.find_spec("jax") is not None


@pytest.mark.parametrize("text", ["0", "1.5", "half"])
def test_share_of_a_gpus_memory(text, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
    with pytest.raises(UserError, match="XLA_PYTHON_CLIENT_MEM_FRACTION"):
        topology._share_of_memory()


def test_this_machine():
    found = topology.open_topology("cpu:1")
    assert (found.platform, found.kind, len(found.devices)) == ("cpu", "cpu", 1)
    assert found.capacity.memory > 2**28

"""Checkpoints through kills, full disks and damaged files."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import abstract, assert_same, make_state, save_all
from tiny import tiny_dataset

from cem_jax.errors import RunFailed, UserError
from cem_jax.runs.checkpoints import Writer
from cem_jax.runs.position import Position


def cut(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(b ^ 0x5A for b in content[middle : middle + 8])
    path.write_bytes(content)


# The largest file holds the arrays' bytes, which Orbax stores without a checksum.
LARGEST, SMALLEST_NODE, INFO = "largest", "manifest.ocdbt", "info/metadata"


@pytest.mark.parametrize("which", [LARGEST, SMALLEST_NODE, INFO, "checksums.sha256"])
@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_a_damaged_newest_one_is_reported_and_the_previous_one_used(
    opened, lines, tmp_path, which, harm
):
    save_all(opened(), 1, 2, 3)
    folder = tmp_path / "c" / "3"
    files = [path for path in (folder / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    target = largest if which == LARGEST else folder / which
    harm(target if target.exists() else folder / "state" / which)
    checkpointer = opened(keep=2)
    state, info = checkpointer.restore(None, abstract(make_state()))
    assert info.position == Position(2, loss=2.0)
    assert_same(state, make_state(2))
    named = [line for line in lines if "3" in line]
    assert named and ("damaged" in named[0] or "not a complete" in named[0])
    assert checkpointer.latest_step() == 2
    with pytest.raises(UserError, match="checkpoint 3 in"):
        opened().restore(3, abstract(make_state()))
    # The damaged one must not count as one of the newest two.
    checkpointer.save(make_state(4), Position(4))
    checkpointer.wait()
    assert checkpointer.steps() == [2, 4]


def test_all_damaged_is_an_error_that_lists_them(opened, lines, tmp_path):
    save_all(opened(), 1, 2)
    for step in "12":
        flip(tmp_path / "c" / step / "info" / "metadata")
    with pytest.raises(UserError) as error:
        opened().restore(None, abstract(make_state()))
    assert len(error.value.messages) == 2
    with pytest.raises(UserError, match="info/metadata has been altered"):
        opened().info(2)


def test_a_copied_run_directory_restores(opened, tmp_path):
    save_all(opened(), 1, 2)
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    shutil.rmtree(tmp_path / "c")
    for marker in (tmp_path / "copy").rglob("commit_success.txt"):
        marker.unlink()
    with Writer(tmp_path / "copy", keep=1, keep_best=False) as copy:
        assert_same(copy.restore(None, abstract(make_state()))[0], make_state(2))


def test_sums_can_be_checked_by_hand(opened, tmp_path):
    save_all(opened(), 1)
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("no sha256sum on this machine")
    subprocess.run([tool, "--quiet", "-c", "checksums.sha256"], cwd=tmp_path / "c/1", check=True)


def test_a_save_that_fails_in_the_background_ends_the_run(opened, monkeypatch, tmp_path):
    checkpointer = opened()
    save_all(checkpointer, 1)

    def full(directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cem_jax.runs.checkpoints.write_checksums", full)
    for surface in (checkpointer.wait, lambda: checkpointer.save(make_state(), Position(3))):
        checkpointer.save(make_state(2), Position(2))
        with pytest.raises(RunFailed, match=r"checkpoint 2 .*No space left.*newest complete is 1"):
            surface()
    checkpointer.save(make_state(2), Position(2))
    with pytest.raises(RunFailed, match="No space left"):
        for _ in range(10_000):
            checkpointer.check()
            checkpointer._orbax._async_manager._thread.join(0.01)
    assert opened().restore(None, abstract(make_state()))[1].step == 1
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["1"]


def test_a_full_disk_ends_the_run(tmp_path):
    """Simulates a full disk by limiting the process's files to 100 kB."""
    full = """
        import resource, signal, sys
        import jax
        from cem_jax.errors import RunFailed
        from cem_jax.runs.checkpoints import Writer
        from cem_jax.runs.position import Position

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG instead
        checkpointer = Writer(sys.argv[1], keep=3, keep_best=False)
        checkpointer.save({"w": jax.random.normal(jax.random.key(1), (100,))}, Position(1))
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        checkpointer.save({"w": jax.random.normal(jax.random.key(2), (100_000,))}, Position(2))
        try:
            checkpointer.close()
        except RunFailed as error:
            assert "File too large" in str(error) and len(str(error)) < 600, error
            assert "the newest complete is 1" in str(error), error
            print("failed as it should")
    """
    script = [sys.executable, "-c", textwrap.dedent(full), str(tmp_path / "c")]
    done = subprocess.run(script, capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout == "failed as it should\n", done.stderr
    assert os.listdir(tmp_path / "c") == ["1"]


FULL = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from tiny import BASE, FIELDS
    from cem_jax import cli

    fields = FIELDS | {"data.path": sys.argv[2], "model.vocab_size": 20_000, "checkpoint.keep": 9}
    fields |= {"checkpoint.every": 2, "eval.every": 100, "train.steps": 1000, "model.layers": 1}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    sys.exit(cli.main(["train", "--config", BASE, "--workdir", sys.argv[3], *flags]))
"""


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 24 MB: room for one checkpoint of 15 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_run_on_a_full_disk_ends_with_a_plain_line(small_disk, tmp_path):
    tests = Path(__file__).parents[1]
    dataset = tiny_dataset(tmp_path)
    script = [sys.executable, "-c", textwrap.dedent(FULL), str(tests), str(dataset)]
    done = subprocess.run([*script, str(small_disk / "run")], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "ERROR" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("cem: error:")]
    told = re.search(r"checkpoint (\d+) could not be .*No space left .*complete is (\d+)$", line)
    failed, last = map(int, told.groups())
    assert 2 <= last == failed - 2
    steps = [int(number) for number in re.findall(r"step (\d+)/1000", done.stderr)]
    assert max(steps, default=0) < 100  # it did not continue without checkpoints
    with Writer(small_disk / "run" / "checkpoints", keep=1, keep_best=False) as found:
        assert found.steps()[-1] == last == found.info(last).position.step
    names = os.listdir(small_disk / "run" / "checkpoints")
    assert all(name.isdecimal() for name in names)  # partial saves were removed


def test_a_directory_that_cannot_be_made_ends_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        Writer(tmp_path / "file" / "c", keep=1, keep_best=False) as checkpointer,
        pytest.raises(RunFailed, match="checkpoint 1 could not be written"),
    ):
        checkpointer.save(make_state(), Position(1))


KILLED = """
    import os, signal, sys, threading
    import jax
    from cem_jax.runs.checkpoints import Writer
    from cem_jax.runs.position import Position

    directory, delay = sys.argv[1], float(sys.argv[2])
    state = lambda step: {"w": jax.random.normal(jax.random.key(step), (1000, 500))}
    checkpointer = Writer(directory, keep=1, keep_best=False)
    checkpointer.save(state(1), Position(1, loss=1.0))
    checkpointer.wait()
    for step in range(2, 100):
        checkpointer.save(state(step), Position(step, loss=float(step)))
        if step == 3:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
"""


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
def test_killed_while_saving(tmp_path, delay):
    script = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "c"), str(delay)]
    done = subprocess.run(script, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL, done.stderr
    wanted = {"w": jax.ShapeDtypeStruct((1000, 500), jnp.float32)}
    report = []
    with Writer(tmp_path / "c", keep=1, keep_best=False, report=report.append) as again:
        state, info = again.restore(None, wanted)
        step = info.step
        assert step >= 2  # each save waits for the one before it
        assert info.position == Position(step, loss=float(step))
        assert_same(state, {"w": jax.random.normal(jax.random.key(step), (1000, 500))})
        again.save(state, Position(step + 1))
        again.wait()
        assert again.steps() == [step + 1]
    assert all("is not a complete checkpoint: ignored" in line for line in report)
    assert len(os.listdir(tmp_path / "c")) == 1


MESHES = """
    import sys
    import jax
    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from cem_jax.runs.checkpoints import Writer
    from cem_jax.runs.position import Position

    values = np.arange(128, dtype=np.float32).reshape(8, 16)
    shapes = [(2, 4), (1, 1), (8, 1), (1, 2)]
    for step, shape in enumerate(shapes):
        mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("a", "b"))
        sharding = NamedSharding(mesh, P("a", "b"))
        with Writer(sys.argv[1], keep=1, keep_best=False) as checkpointer:
            if step:
                wanted = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}
                state, info = checkpointer.restore(None, wanted)
                assert info.step == step - 1
                assert state["w"].sharding == sharding
                np.testing.assert_array_equal(state["w"], values)
            checkpointer.save({"w": jax.device_put(values, sharding)}, Position(step))
"""


def test_restores_onto_other_meshes(tmp_path, opened):
    script = [sys.executable, "-c", textwrap.dedent(MESHES), str(tmp_path / "c")]
    subprocess.run(script, check=True, env=dict(os.environ))
    wanted = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    state = opened().restore(None, wanted)[0]
    np.testing.assert_array_equal(state["w"], np.arange(128.0).reshape(8, 16))

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cem_jax.errors import RunFailed, UserError
from cem_jax.train.checkpoint import Checkpointer


class TrainState(NamedTuple):
    params: dict
    opt_state: tuple
    step: jax.Array


def make_state(seed=0, width=5):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "blocks": {"query": jax.random.normal(keys[0], (2, 3, width))},
        "head": jax.random.normal(keys[1], (7,)).astype(jnp.bfloat16),
        "scale": jax.random.normal(keys[2], ()),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    return TrainState(params, optimizer.init(params), jnp.int32(seed))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def opened(tmp_path, lines):
    """Opens checkpointers below tmp_path and closes them all."""
    made = []

    def open_one(keep=3, keep_best=True):
        made.append(
            Checkpointer(tmp_path / "c", keep=keep, keep_best=keep_best, report=lines.append)
        )
        return made[-1]

    yield open_one
    for one in made:
        one.close()


def save_all(checkpointer, *steps):
    for step in steps:
        checkpointer.save(step, make_state(step), {"note": step})
    checkpointer.wait()


def test_round_trip_is_bit_identical(opened):
    state = make_state(4)
    extra = {"config": {"dim": 5, "tau": None}, "position": 12, "tokenizer": "AAEC", "é": [1.5]}
    first = opened()
    first.save(4, state, extra, metric=2.5)
    first.save(5, make_state(5), extra)
    first.wait()
    restored, got, step = opened().restore(4, abstract(state))
    assert step == 4
    assert got == extra
    assert_same(restored, state)
    assert opened().restore(None, abstract(state))[2] == 5
    assert opened().read_extra(4) == extra


def test_double_precision_special_values_and_integers(opened, x64):
    values = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324, 1 / 3])
    state = {
        "f64": jnp.array(values),
        "f32": jnp.array(values, jnp.float32),
        "i64": jnp.array([2**62, -1]),
        "u8": jnp.array([0, 255], jnp.uint8),
        "flag": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "python": 7,
    }
    checkpointer = opened()
    checkpointer.save(0, state, {})
    checkpointer.wait()
    state["python"] = jnp.asarray(7)
    assert_same(checkpointer.restore(0, abstract(state))[0], state)


def test_state_may_be_donated_while_it_is_saved(opened):
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    state = {"w": jax.random.normal(jax.random.key(0), (300, 400))}
    before = np.asarray(state["w"]).copy()
    checkpointer = opened()
    checkpointer.save(1, state, {})
    for _ in range(5):
        state = jax.block_until_ready(update(state))
    restored = checkpointer.restore(1, abstract(state))[0]
    np.testing.assert_array_equal(restored["w"], before)


def test_part_of_a_state_can_be_read_by_name(opened):
    save_all(opened(), 3)
    wanted = {"params": abstract(make_state().params)}
    with pytest.raises(UserError, match="opt_state/1/0/mu/head: bfloat16"):
        opened().restore(3, wanted)
    restored, _, _ = opened().restore(3, wanted, partial=True)
    assert_same(restored["params"], make_state(3).params)


def test_another_architecture_is_refused_with_what_differs(opened):
    save_all(opened(), 1)
    other = abstract(make_state(1, width=6))
    other.params["extra"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    other.params["scale"] = jax.ShapeDtypeStruct((), jnp.bfloat16)
    with pytest.raises(UserError) as error:
        opened().restore(None, other)
    text = str(error.value)
    assert "params/blocks/query: float32[2, 3, 5] in the checkpoint, float32[2, 3, 6] here" in text
    assert "params/extra: absent in the checkpoint, float32[2] here" in text
    assert "params/scale: float32[] in the checkpoint, bfloat16[] here" in text
    assert "params/head" not in text


def test_narrowing_is_refused(opened):
    with pytest.raises(ValueError, match="w: JAX has no float64"):
        opened().save(1, {"w": np.zeros(3)}, {})


@pytest.mark.parametrize(
    ("metrics", "kept", "best"),
    [
        ([1.0, 2.0, 3.0, 4.0], [10, 30, 40], 10),
        ([4.0, 3.0, 2.0, 1.0], [30, 40], 40),
        ([2.0, float("nan"), 3.0, None], [10, 30, 40], 10),
        ([None, None, None, None], [30, 40], None),
        ([float("nan"), float("-inf"), float("nan"), float("nan")], [30, 40], None),
        ([1.0, 1.0, 5.0, 5.0], [20, 30, 40], 20),
    ],
)
def test_newest_and_best_are_kept(opened, metrics, kept, best):
    checkpointer = opened(keep=2)
    for index, metric in enumerate(metrics):
        checkpointer.save(10 * index + 10, make_state(index), {}, metric)
    checkpointer.wait()
    for one in (checkpointer, opened(keep=2)):
        assert one.steps() == kept
        assert one.latest_step() == 40
        assert one.best_step() == best
        for step in kept:
            assert_same(one.restore(step, abstract(make_state()))[0], make_state(step // 10 - 1))


def test_best_goes_when_it_is_not_wanted(opened):
    checkpointer = opened(keep=1, keep_best=False)
    for step, metric in [(1, 1.0), (2, 2.0)]:
        checkpointer.save(step, make_state(), {}, metric)
    checkpointer.wait()
    assert checkpointer.steps() == [2]


def test_nothing_goes_before_the_new_save_is_complete(opened):
    checkpointer = opened(keep=1)
    save_all(checkpointer, 1)
    checkpointer.save(2, make_state(2), {})
    assert 1 in checkpointer.steps()
    checkpointer.wait()
    assert checkpointer.steps() == [2]


def test_saving_a_step_again_replaces_it(opened, tmp_path):
    checkpointer = opened()
    save_all(checkpointer, 1)
    checkpointer.save(1, make_state(9), {"note": "again"}, 1.0)
    checkpointer.wait()
    assert_same(checkpointer.restore(1, abstract(make_state()))[0], make_state(9))
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["1"]


def test_one_set_aside_stands_in_until_its_step_is_saved_again(opened, tmp_path):
    save_all(opened(), 1)
    (tmp_path / "c" / "1").rename(tmp_path / "c" / "1.replaced")  # killed right after the rename
    assert_same(opened().restore(None, abstract(make_state()))[0], make_state(1))
    save_all(opened(), 2)
    assert opened().steps() == [1, 2]


def test_going_on_from_an_earlier_step_drops_the_later_ones(opened):
    save_all(opened(), 1, 2, 3)
    save_all(opened(), 2)
    assert opened().steps() == [1, 2]


def test_directories_that_are_no_checkpoint_are_ignored(opened, lines, tmp_path):
    assert opened().latest_step() is None
    save_all(opened(), 5)
    (tmp_path / "c" / "7").mkdir()
    (tmp_path / "c" / "8.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "c" / "notes").mkdir()
    checkpointer = opened()
    assert checkpointer.steps() == [5]
    assert checkpointer.latest_step() == 5
    assert checkpointer.restore(None, abstract(make_state()))[2] == 5
    assert len(lines) == 2
    assert "c/7 is not a complete checkpoint" in lines[0]
    assert "8.orbax-checkpoint-tmp is not" in lines[1]
    save_all(checkpointer, 7)
    assert opened().steps() == [5, 7]
    assert not (tmp_path / "c" / "8.orbax-checkpoint-tmp").exists()


def test_no_checkpoint_at_all(opened):
    with pytest.raises(UserError, match=r"no complete checkpoint in .*none at all"):
        opened().restore(None, abstract(make_state()))
    save_all(opened(), 5, 6)
    with pytest.raises(UserError, match=r"no complete checkpoint 4 in .*there are: 5, 6"):
        opened().restore(4, abstract(make_state()))


def cut(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(b ^ 0x5A for b in content[middle : middle + 8])
    path.write_bytes(content)


# The largest file holds the arrays' own bytes, which Orbax stores without a checksum.
LARGEST, SMALLEST_NODE, INFO = "largest", "manifest.ocdbt", "info/metadata"


@pytest.mark.parametrize("which", [LARGEST, SMALLEST_NODE, INFO, "checksums.sha256"])
@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_a_damaged_newest_one_is_named_and_the_one_before_it_used(
    opened, lines, tmp_path, which, harm
):
    save_all(opened(), 1, 2, 3)
    folder = tmp_path / "c" / "3"
    files = [path for path in (folder / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    target = largest if which == LARGEST else folder / which
    harm(target if target.exists() else folder / "state" / which)
    checkpointer = opened(keep=2)
    state, extra, step = checkpointer.restore(None, abstract(make_state()))
    assert step == 2
    assert extra == {"note": 2}
    assert_same(state, make_state(2))
    named = [line for line in lines if "3" in line]
    assert named and ("damaged" in named[0] or "not a complete" in named[0])
    assert checkpointer.latest_step() == 2
    with pytest.raises(UserError, match="checkpoint 3 in"):
        opened().restore(3, abstract(make_state()))
    # The damaged one must not count as one of the newest two.
    checkpointer.save(4, make_state(4), {})
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
        opened().read_extra()


def test_a_copied_run_directory_restores(opened, tmp_path):
    save_all(opened(), 1, 2)
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    shutil.rmtree(tmp_path / "c")
    for marker in (tmp_path / "copy").rglob("commit_success.txt"):
        marker.unlink()
    with Checkpointer(tmp_path / "copy", keep=1, keep_best=False) as copy:
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

    monkeypatch.setattr("cem_jax.train.checkpoint.write_checksums", full)
    for surface in (checkpointer.wait, lambda: checkpointer.save(3, make_state(), {})):
        checkpointer.save(2, make_state(2), {})
        with pytest.raises(RunFailed, match=r"checkpoint 2 .*No space left.*newest complete is 1"):
            surface()
    checkpointer.save(2, make_state(2), {})
    with pytest.raises(RunFailed, match="No space left"):
        for _ in range(10_000):
            checkpointer.check()
            checkpointer._orbax._async_manager._thread.join(0.01)
    assert opened().restore(None, abstract(make_state()))[2] == 1
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["1"]


def test_a_full_disk_ends_the_run(tmp_path):
    """Stands in for a full disk: no file of the process may grow beyond 100 kB."""
    full = """
        import resource, signal, sys
        import jax
        from cem_jax.errors import RunFailed
        from cem_jax.train.checkpoint import Checkpointer

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG instead
        checkpointer = Checkpointer(sys.argv[1], keep=3, keep_best=False)
        checkpointer.save(1, {"w": jax.random.normal(jax.random.key(1), (100,))}, {})
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        checkpointer.save(2, {"w": jax.random.normal(jax.random.key(2), (100_000,))}, {})
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


def test_a_directory_that_cannot_be_made_ends_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        Checkpointer(tmp_path / "file" / "c", keep=1, keep_best=False) as checkpointer,
        pytest.raises(RunFailed, match="checkpoint 1 could not be written"),
    ):
        checkpointer.save(1, make_state(), {})


KILLED = """
    import os, signal, sys, threading
    import jax
    from cem_jax.train.checkpoint import Checkpointer

    directory, delay = sys.argv[1], float(sys.argv[2])
    state = lambda step: {"w": jax.random.normal(jax.random.key(step), (1000, 500))}
    checkpointer = Checkpointer(directory, keep=1, keep_best=False)
    checkpointer.save(1, state(1), {"note": 1})
    checkpointer.wait()
    for step in range(2, 100):
        checkpointer.save(step, state(step), {"note": step})
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
    with Checkpointer(tmp_path / "c", keep=1, keep_best=False, report=report.append) as again:
        state, extra, step = again.restore(None, wanted)
        assert step >= 2  # each save waits for the one before it
        assert extra == {"note": step}
        assert_same(state, {"w": jax.random.normal(jax.random.key(step), (1000, 500))})
        again.save(step + 1, state, {})
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
    from cem_jax.train.checkpoint import Checkpointer

    values = np.arange(128, dtype=np.float32).reshape(8, 16)
    shapes = [(2, 4), (1, 1), (8, 1), (1, 2)]
    for step, shape in enumerate(shapes):
        mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("a", "b"))
        sharding = NamedSharding(mesh, P("a", "b"))
        with Checkpointer(sys.argv[1], keep=1, keep_best=False) as checkpointer:
            if step:
                wanted = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}
                state, _, at = checkpointer.restore(None, wanted)
                assert at == step - 1
                assert state["w"].sharding == sharding
                np.testing.assert_array_equal(state["w"], values)
            checkpointer.save(step, {"w": jax.device_put(values, sharding)}, {})
"""


def test_restores_onto_other_meshes(tmp_path, opened):
    script = [sys.executable, "-c", textwrap.dedent(MESHES), str(tmp_path / "c")]
    subprocess.run(script, check=True, env=dict(os.environ))
    wanted = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    state = opened().restore(None, wanted)[0]
    np.testing.assert_array_equal(state["w"], np.arange(128.0).reshape(8, 16))


def test_info_is_plain_json(opened, tmp_path):
    checkpointer = opened()
    checkpointer.save(3, {"w": jnp.zeros((2, 3))}, {"a": 1}, float("nan"))
    checkpointer.wait()
    text = (tmp_path / "c" / "3" / "info" / "metadata").read_text()
    assert json.loads(text) == {
        "step": 3,
        "metric": None,
        "arrays": {"w": "float32[2, 3]"},
        "extra": {"a": 1},
    }

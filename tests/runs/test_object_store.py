"""Runs in an object store without rename: a local stand-in for Google's."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cem_jax.errors import UserError
from cem_jax.storage.paths import place

TESTS = Path(__file__).parents[1]
pytest.importorskip("gcsfs", reason="gcsfs, which reads gs://, is not installed: cem_jax[cloud]")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The environment in which gs:// is a local store."""
    address = tmp_path_factory.mktemp("store") / "address"
    server = subprocess.Popen([sys.executable, str(TESTS / "runs" / "fake_gcs.py"), str(address)])
    deadline = time.monotonic() + 60
    while not (address.exists() and address.read_text()):
        assert time.monotonic() < deadline and server.poll() is None
        time.sleep(0.05)
    url = address.read_text()
    yield os.environ | {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "JAX_PLATFORMS": "cpu",
    }
    server.kill()
    server.wait()


def run(store, script, *arguments, status=0):
    head = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / 'runs')!r}]\n"
    command = [sys.executable, "-c", head + textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=store, timeout=300)
    assert done.returncode == status, done.stderr
    return done


SAVES = """
    import os, signal
    from checkpoint_states import abstract, assert_same, make_state
    from etils import epath
    from cem_jax.runs import checkpoints
    from cem_jax.storage import paths
    from cem_jax.runs.checkpoints import Writer
    from cem_jax.runs.position import Position

    def refuse(*_):
        raise AssertionError("a rename: an object store has none")

    for path in (epath.Path, paths.place):
        type(path("gs://b/x")).rename = refuse
    url = "gs://bucket/run/checkpoints"
    opened = lambda **more: Writer(url, keep=1, keep_best=False, **more)
    with opened(keep_every=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(make_state(step), Position(step))
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3], checkpoints.steps()
        assert_same(checkpoints.restore(None, abstract(make_state()))[0], make_state(3))
        checkpoints.save(make_state(9), Position(3))  # again: the first stays complete until then
        assert checkpoints.steps() == [2, 3]
        checkpoints.wait()
    with opened() as checkpoints:
        assert_same(checkpoints.restore(3, abstract(make_state()))[0], make_state(9))
    # As if copied by a tool that skips unknown files: only the checksum list counts.
    for depth in ("*", "*/*"):
        for marker in list(paths.place(url).glob(f"{depth}/commit_success.txt")):
            marker.unlink()
    lines = []
    (paths.place(url) / "7" / "state" / "half").write_text("not complete")
    with opened(report=lines.append) as checkpoints:
        assert checkpoints.latest_step() == 3
        assert_same(checkpoints.restore(None, abstract(make_state()))[0], make_state(9))
    assert ["7 is not a complete checkpoint" in line for line in lines] == [True], lines
    (paths.place(url) / "3" / "info" / "metadata").write_text("{}")
    with opened(report=lines.append) as checkpoints:
        assert checkpoints.restore(None, abstract(make_state()))[1].step == 2
    assert any("checkpoint 3 in gs://bucket/run/checkpoints is damaged" in line for line in lines)
"""


def test_checkpoints_without_rename(store):
    run(store, SAVES)


REMOVAL = """
    import os, signal
    from checkpoint_states import make_state
    from cem_jax.storage import paths
    from cem_jax.runs.checkpoints import Writer
    from cem_jax.runs.position import Position

    with Writer("gs://bucket/killed", keep=1, keep_best=False) as checkpoints:
        checkpoints.save(make_state(1), Position(1))
        checkpoints.save(make_state(2), Position(2))
        unpatched = paths._clear

        def clear(directory):
            (directory / "info" / "metadata").unlink()
            os.kill(os.getpid(), signal.SIGKILL)

        paths._clear = clear
        checkpoints.wait()
"""
AFTER = """
    from checkpoint_states import abstract, make_state
    from cem_jax.runs.checkpoints import Writer
    from cem_jax.runs.position import Position
    from cem_jax.storage.paths import entries

    lines = []
    with Writer("gs://bucket/killed", keep=1, keep_best=False, report=lines.append) as found:
        assert found.steps() == [2] and found.restore(None, abstract(make_state()))[1].step == 2
        found.save(make_state(3), Position(3))
        found.wait()
        print(*[path.name for path in entries(found.directory)])
"""


@pytest.mark.slow
def test_killed_during_a_removal(store):
    run(store, REMOVAL, status=-signal.SIGKILL)
    assert run(store, AFTER).stdout == "3\n"


TRAINS = """
    import os, signal, sys
    from tiny import tiny_config
    from cem_jax.runs import checkpoints
    from cem_jax.runs import training

    if sys.argv[3] == "kill":
        unpatched = checkpoints.write_checksums

        def write(directory):
            if directory.name.split(".")[0] == "4":
                os.kill(os.getpid(), signal.SIGKILL)
            unpatched(directory)

        checkpoints.write_checksums = write
    fields = dict(train__steps=5, model__layers=1, eval__every=2, checkpoint__every=2)
    print(training.train(tiny_config(data__path=sys.argv[1], **fields), sys.argv[2]))
"""
READS = """
    import sys
    import numpy as np
    import jax
    from cem_jax.runs.metrics import read_metrics
    from cem_jax.runs.run import Run
    from undisturbed import assert_same_run

    run = Run.open(sys.argv[1])
    assert run.step == 5 and run.tokenizer.vocab_size == 320
    assert_same_run(run.workdir, Run.open(sys.argv[2]).workdir, run.config)
    assert [line["step"] for line in read_metrics(sys.argv[1]) if line["kind"] == "train"] == [
        1, 2, 3, 4, 5
    ]
"""


@pytest.mark.slow
def test_a_run_is_killed_resumed_and_read(store, dataset, tmp_path):
    url = "gs://bucket/whole/run"
    run(store, TRAINS, dataset, url, "kill", status=-signal.SIGKILL)
    done = run(store, TRAINS, dataset, url, "go on")
    assert (
        "resuming at step 2" in done.stderr and "gs://bucket/whole/run/checkpoints/5" in done.stdout
    )
    run(store, TRAINS, dataset, tmp_path / "local", "go on")
    run(store, READS, url, tmp_path / "local")


def test_urls_of_another_kind_are_refused():
    with pytest.raises(UserError, match="ftp://host/run: runs are kept in directories, gs:// and"):
        place("ftp://host/run")


def test_a_local_url_is_named_without_its_prefix():
    with pytest.raises(UserError, match=r"file:///a/run: a local .* without the prefix: /a/run"):
        place("file:///a/run")

"""Which directories are checkpoints, which is the best, and which are lastingly damaged."""

import errno
import shutil

import pytest
from checkpoint_states import abstract, make_state, save_all

from cem_jax.errors import RunFailed, UserError
from cem_jax.runs import integrity
from cem_jax.runs.checkpoints import Info, Writer
from cem_jax.runs.position import Position


def fail_to_read(patch, part):
    """Simulate a disk or network that cannot read `part` for a while."""
    real = integrity._digest

    def digest(directory, name):
        if part in str(directory / name):
            return integrity._unread(name, OSError(errno.EIO, "Input/output error"))
        return real(directory, name)

    patch.setattr(integrity, "_digest", digest)


def test_one_that_cannot_be_read_for_a_while_stays(opened, lines, tmp_path, monkeypatch):
    save_all(opened(), 2, 4, 6)
    with monkeypatch.context() as patch:
        fail_to_read(patch, "c/6/state")
        checkpointer = opened(keep=1, keep_best=False)
        assert checkpointer.restore(None, abstract(make_state()))[1].step == 4
        assert "Input/output error" in lines[0] and "continuing from checkpoint 4" in lines[1]
        save_all(checkpointer, 5)
    assert checkpointer.steps() == [5] and (tmp_path / "c" / "6").exists()
    assert opened().restore(None, abstract(make_state()))[1].step == 6
    save_all(checkpointer, 6, 7)  # rewritten, it is like any other
    assert opened().steps() == [7]


def test_damage_is_checked_again_before_removal(opened, lines, tmp_path):
    save_all(opened(), 1, 2)
    metadata = tmp_path / "c" / "2" / "info" / "metadata"
    content = metadata.read_bytes()
    metadata.write_bytes(b"")
    checkpointer = opened(keep=1, keep_best=False)
    assert checkpointer.restore(None, abstract(make_state()))[1].step == 1
    metadata.write_bytes(content)  # like a cache that served old content
    save_all(checkpointer, 3)
    assert "checkpoint 2 in" in lines[-1] and "stays" in lines[-1]
    assert opened().steps() == [2, 3]


def test_a_renamed_one_is_not_taken_for_another_step(opened, lines, tmp_path):
    save_all(opened(), 3, 6)
    (tmp_path / "c" / "6").rename(tmp_path / "c" / "9")
    checkpointer = opened(keep=1, keep_best=False)
    assert checkpointer.restore(None, abstract(make_state()))[1].step == 3
    assert "checkpoint 9" in lines[0] and "is of step 6: the directory was renamed" in lines[0]
    with pytest.raises(UserError, match="was renamed"):
        opened().restore(9, abstract(make_state()))
    save_all(checkpointer, 4)
    assert (tmp_path / "c" / "9").exists()


def test_the_fallback_is_reported_whatever_file_is_damaged(opened, lines, tmp_path):
    save_all(opened(), 1, 2)
    (tmp_path / "c" / "2" / "checksums.sha256").write_text("")
    checkpointer = opened()
    checkpointer.restore(None, abstract(make_state()))
    assert lines[-1] == f"continuing from checkpoint 1 in {tmp_path / 'c'}"


def test_only_like_measures_compete(opened):
    checkpointer = opened(keep=1)
    measured = [(1, 1.0, "a part"), (2, 3.0, "all"), (3, 2.0, "all"), (4, None, None)]
    for step, metric, measure in measured:
        checkpointer.save(make_state(step), Position(step), metric, measure)
    checkpointer.wait()
    assert checkpointer.steps() == [3, 4] and opened().best_step() == 3


def test_the_best_is_whole(opened, lines, tmp_path):
    first = opened(keep=2)
    for step in (1, 2, 3):
        first.save(make_state(step), Position(step), float(step))
    first.wait()
    (tmp_path / "c" / "1" / "state" / "_METADATA").write_text("{}")
    checkpointer = opened(keep=2)
    checkpointer.save(make_state(4), Position(4), 4.0)
    checkpointer.wait()
    assert "checkpoint 1 in" in lines[0] and "state/_METADATA has been altered" in lines[0]
    assert opened().steps() == [2, 3, 4]  # the best undamaged one, and the newest two


def test_a_removed_run_directory_is_not_recreated(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with Writer(run / "checkpoints", keep=1, keep_best=False) as checkpointer:
        save_all(checkpointer, 1)
        shutil.rmtree(run)
        with pytest.raises(RunFailed, match=r"checkpoint 2 could not .*No such file"):
            checkpointer.save(make_state(), Position(2))
    assert not run.exists()


def test_what_was_complete_once(opened, tmp_path):
    save_all(opened(), 1, 2)
    assert opened().once_complete == []
    (tmp_path / "c" / "1" / "checksums.sha256").unlink()
    (tmp_path / "c" / "5").mkdir()  # not ours
    (tmp_path / "c" / "6.orbax-checkpoint-tmp").mkdir()  # killed while saving
    (tmp_path / "c" / "6.orbax-checkpoint-tmp" / "x").write_text("")
    assert opened().once_complete == ["1"]


def test_names_that_are_no_steps(opened, tmp_path):
    save_all(opened(), 2)
    for name in ("\u0661\u0662", "012", "02.replaced"):
        shutil.copytree(tmp_path / "c" / "2", tmp_path / "c" / name)
    assert opened().steps() == [2]
    save_all(opened(keep=1, keep_best=False), 3)
    assert opened().steps() == [3]
    assert len(list((tmp_path / "c").iterdir())) == 4  # foreign directories stay


def test_metadata(opened, tmp_path):
    save_all(opened(keep_every=2), 2)
    info = opened().info(2)
    assert info.milestone and info.position == Position(2, loss=2.0)
    assert info == Info.read(tmp_path / "c" / "2")

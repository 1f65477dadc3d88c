"""Checkpoints removed by training while a reader works, and by hand during training."""

import shutil

import pytest
from checkpoint_states import abstract, assert_same, make_state, save_all
from tiny import tiny_config

from cem_jax.errors import UserError
from cem_jax.runs import checkpoints, training
from cem_jax.runs.checkpoints import Reader
from cem_jax.runs.metrics import read_metrics

ABSTRACT = abstract(make_state())


@pytest.fixture
def reader(tmp_path, lines):
    """Opens a reader that reports to `lines`."""
    return lambda: Reader(tmp_path / "c", report=lines.append)


def test_a_reader_takes_the_next_newest_when_its_choice_is_removed(opened, reader, lines):
    writer = opened(keep=1, keep_best=False)
    save_all(writer, 1)
    found = reader()
    save_all(writer, 2)
    state, info = found.restore(None, ABSTRACT)
    assert info.step == 2
    assert_same(state, make_state(2))
    assert found.steps() == [2] and lines == []


def test_a_checkpoint_may_be_removed_while_it_is_read(opened, reader, lines):
    writer = opened(keep=1, keep_best=False)
    save_all(writer, 1)

    def wanted(info):  # chosen and checked, not read yet
        if info.step < 4:
            save_all(writer, info.step + 1)
        return ABSTRACT

    state, info = reader().restore(None, wanted)
    assert info.step == 4
    assert_same(state, make_state(4))
    assert lines == []


def test_a_checkpoint_may_be_removed_while_it_is_checked(opened, reader, lines, monkeypatch):
    writer = opened(keep=1, keep_best=False)
    save_all(writer, 1)
    unpatched, todo = checkpoints.find_damage, [2, 3]

    def find(directory, only=None):
        if todo:
            save_all(writer, todo.pop(0))
        return unpatched(directory, only)

    monkeypatch.setattr(checkpoints, "find_damage", find)
    assert reader().restore(None, ABSTRACT)[1].step == 3
    assert lines == []


def test_a_requested_one_that_is_removed_is_not_called_damaged(opened, reader, lines):
    writer = opened(keep=1, keep_best=False)
    save_all(writer, 1)
    found = reader()
    save_all(writer, 2)
    with pytest.raises(UserError, match=r"no complete checkpoint 1 in .*there are: 2$"):
        found.restore(1, ABSTRACT)
    assert lines == []


def test_a_damaged_one_is_distinguished_from_a_removed_one(opened, reader, lines, tmp_path):
    save_all(opened(), 1, 2)
    found = reader()
    (tmp_path / "c" / "2" / "state" / "_METADATA").unlink()
    assert found.restore(None, ABSTRACT)[1].step == 1
    assert "checkpoint 2 in" in lines[0] and "_METADATA is missing" in lines[0]


def test_retention_continues_when_checkpoints_were_removed_by_hand(opened, lines, tmp_path):
    writer = opened(keep=2)
    writer.save(make_state(1), checkpoints.Position(1), 1.0)  # the best
    for step in (2, 3, 4):
        writer.save(make_state(step), checkpoints.Position(step), float(step))
    writer.wait()
    assert writer.steps() == [1, 3, 4]
    for name in ("1", "4"):
        shutil.rmtree(tmp_path / "c" / name)
    writer.save(make_state(5), checkpoints.Position(5), 5.0)
    writer.wait()
    assert writer.steps() == [3, 5] and lines == []  # the newest two; 3 is also the best
    shutil.rmtree(tmp_path / "c" / "5")
    shutil.rmtree(tmp_path / "c" / "3")
    save_all(writer, 6)
    assert writer.steps() == [6] and lines == []


def test_training_continues_when_its_newest_checkpoint_is_removed(dataset, tmp_path):
    removed = []

    def remove(done):
        for path in (tmp_path / "run" / "checkpoints").glob("[0-9]"):
            if done == 5:
                shutil.rmtree(path)
                removed.append(path.name)

    fields = dict(train__steps=6, model__layers=1, eval__every=2, checkpoint__every=2)
    config = tiny_config(data__path=str(dataset), **fields)
    assert training.train(config, tmp_path / "run", after_step=remove)["step"] == 6
    assert removed
    assert Reader(tmp_path / "run" / "checkpoints").latest_step() == 6
    assert read_metrics(tmp_path / "run")[-1]["kind"] == "eval"


def test_a_stray_checkpoints_directory_without_a_run_does_not_prevent_a_beginning(
    dataset, tmp_path
):
    config = tiny_config(data__path=str(dataset), train__steps=2, checkpoint__every=2)
    stray = tmp_path / "run" / "checkpoints"
    (stray / "drafts").mkdir(parents=True)
    (stray / "notes.txt").write_text("mine")
    assert training.train(config, tmp_path / "run")["step"] == 2
    assert (stray / "notes.txt").read_text() == "mine" and (stray / "drafts").is_dir()
    assert training.train(config, tmp_path / "run")["step"] == 2  # it resumes, beside them
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(UserError, match=r"has checkpoints/ but no config\.json"):
        training.train(config, tmp_path / "run")

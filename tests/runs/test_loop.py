"""`cem train` as a whole: stopping and resuming, refusals, metrics, runs that go bad."""

import base64
import io
import json
import re
import shutil
import signal

import jax
import numpy as np
import pytest
from stopped import stop_after
from tiny import tiny_config, tiny_dataset
from undisturbed import assert_same_run, final_state

from cem_jax.errors import RunFailed, UserError
from cem_jax.runs import checkpoints, loop, training
from cem_jax.runs.checkpoints import Reader
from cem_jax.runs.directory import only_writer, require_nothing_lost, with_absolute_paths
from cem_jax.runs.loop import Due, due_after
from cem_jax.runs.metrics import read_metrics
from cem_jax.runs.run import Run


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """An undisturbed run."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    result = training.train(tiny_config(data__path=str(dataset)), workdir)
    return workdir, result


@pytest.mark.parametrize("step", [1, 3, 4, 8])  # 4 and 8: the validation is repeated
def test_a_run_stopped_and_resumed_is_bit_identical(step, dataset, whole, tmp_path):
    config = tiny_config(data__path=str(dataset))
    with pytest.raises(SystemExit) as stopped:
        training.train(config, tmp_path / "run", **stop_after(step))
    assert stopped.value.code == 128 + signal.SIGTERM
    result = training.train(config, tmp_path / "run")
    assert result["step"] == 8 and result["loss"] == whole[1]["loss"]
    assert_same_run(tmp_path / "run", whole[0], config)


def test_metrics_have_each_step_once_and_end_with_the_final_evaluation(whole):
    lines = read_metrics(whole[0])
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == list(range(1, 9))
    assert lines[-1]["kind"] == "eval" and lines[-1]["bits_per_byte"] > 0
    assert set(lines[0]) >= {"loss", "learning_rate", "grad_norm", "tokens", "epoch"}


def test_a_finished_run_is_left_as_it_is(dataset, whole):
    before = {p: p.stat().st_mtime_ns for p in whole[0].rglob("*") if p.is_file()}
    again = training.train(tiny_config(data__path=str(dataset)), whole[0])
    assert again == whole[1]
    assert before == {p: p.stat().st_mtime_ns for p in whole[0].rglob("*") if p.is_file()}


def test_another_architecture_is_refused_naming_the_fields(dataset, whole):
    other = tiny_config(data__path=str(dataset), model__dim=64, model__attention__steps=3)
    with pytest.raises(UserError) as refused:
        training.train(other, whole[0])
    text = "\n".join(refused.value.messages)
    assert "model.dim: 32 -> 64" in text and "model.attention.steps: 2 -> 3" in text


def test_fields_that_change_no_result_may_change(dataset, whole):
    other = tiny_config(
        data__path=str(dataset), model__attention__implementation="dense", checkpoint__keep=5
    )
    assert training.train(other, whole[0])["step"] == 8


def test_a_relative_dataset_is_found_from_anywhere(dataset, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(dataset.parent)
    relative = tiny_config(data__path=dataset.name, train__steps=1)
    training.train(relative, tmp_path / "run")
    assert Run.open(tmp_path / "run").config.data.path == str(dataset)
    mixed = with_absolute_paths(tiny_config(data__mixture=("a=1", "/b=2", "gs://c/d=3")))
    assert mixed.data.mixture == (f"{dataset.parent}/a=1", "/b=2", "gs://c/d=3")
    assert training.train(tiny_config(data__path=dataset.name), whole[0])["step"] == 8


def test_a_finished_run_follows_its_data(dataset, tmp_path):
    training.train(tiny_config(data__path=str(dataset), train__steps=1), tmp_path / "run")
    moved = shutil.copytree(dataset, tmp_path / "moved")
    training.train(tiny_config(data__path=str(moved), train__steps=1), tmp_path / "run")
    assert Run.open(tmp_path / "run").config.data.path == str(moved)


def test_another_dataset_is_refused(whole, tmp_path):
    other = tiny_dataset(tmp_path, seed=1)
    with pytest.raises(UserError, match="trained on dataset"):
        training.train(tiny_config(data__path=str(other)), whole[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__path": "/no/such/place"}, "no/such/place"),
        ({"data__path": ""}, "data.path"),
        ({"model__vocab_size": 300}, "model.vocab_size"),
        ({"data__separator": "eos"}, "data.separator"),
        ({"data__context": 1_000_000}, "window"),
        ({"train__global_batch": 100_000}, "batch"),
        ({"eval__split": "test"}, "test"),
        ({"train__steps": None}, "train.steps"),
        ({"mesh__data": 3}, "mesh"),
        ({"model__attention__implementation": "pallas"}, "needs a TPU or a GPU"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(changes, message, dataset, tmp_path):
    with pytest.raises(UserError) as refused:
        training.train(tiny_config(**({"data__path": str(dataset)} | changes)), tmp_path / "run")
    assert message in "\n".join(refused.value.messages)
    assert not (tmp_path / "run").exists()


def test_a_token_id_outside_the_vocabulary_is_refused_with_its_place(tmp_path):
    dataset = tiny_dataset(tmp_path)
    shard = dataset / "train" / "tokens-00000.npy"
    tokens = np.load(shard)
    tokens[17] = 320
    np.save(shard, tokens)
    with pytest.raises(UserError, match=r"tokens-00000\.npy"):
        training.train(tiny_config(data__path=str(dataset)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def poison(monkeypatch, steps: set[int]) -> None:
    """Put an id that makes the loss NaN into the batches of some steps."""
    unpatched = loop.place_batch
    count = iter(range(1000))

    def place(batch, mesh):
        if next(count) in steps:
            batch = {"tokens": np.full_like(batch["tokens"], 99_999)}
        return unpatched(batch, mesh)

    monkeypatch.setattr(loop, "place_batch", place)


def test_a_bad_step_is_skipped_and_reported(dataset, tmp_path, monkeypatch):
    poison(monkeypatch, {4})
    training.train(tiny_config(data__path=str(dataset)), tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    events = [line for line in lines if line["kind"] == "event"]
    assert [(e["step"], e["event"]) for e in events] == [(5, "skipped")]
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["loss"] is None for line in train] == [False] * 4 + [True] + [False] * 3
    assert train[-1]["skipped_steps"] == 1


def test_bad_steps_in_a_row_stop_the_run_with_a_good_checkpoint(dataset, tmp_path, monkeypatch):
    poison(monkeypatch, set(range(4, 100)))
    config = tiny_config(data__path=str(dataset), train__max_bad_steps=3)
    with pytest.raises(RunFailed, match="step 7: 3 non-finite steps in a row"):
        training.train(config, tmp_path / "run")
    state = final_state(tmp_path / "run", config)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_the_run_directory_holds_what_eval_and_generate_need(dataset, whole):
    config = json.loads((whole[0] / "config.json").read_text())
    assert config["model"]["dim"] == 32
    model = (whole[0] / "tokenizer.model").read_bytes()
    assert model == (dataset / "tokenizer.model").read_bytes()
    checkpoints = Reader(whole[0] / "checkpoints")
    assert checkpoints.latest_step() == 8
    position = checkpoints.info(8).position
    assert position.config == config and position.dataset and position.windows_consumed == 32
    assert base64.b64decode(position.tokenizer) == model


def test_a_profile_is_written_for_the_steps_asked_for(dataset, tmp_path):
    config = tiny_config(data__path=str(dataset), train__steps=4, log__profile_steps=(2, 2))
    training.train(config, tmp_path / "run")
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_a_profile_that_exceeds_the_end_and_one_begun_midway(dataset, tmp_path):
    fields = dict(data__path=str(dataset), train__steps=4, checkpoint__every=2)
    run = tmp_path / "run"
    training.train(tiny_config(**fields, log__profile_steps=(2, 9)), run)
    assert list((run / "profile").rglob("*.xplane.pb"))
    shutil.rmtree(run / "profile")
    shutil.rmtree(run / "checkpoints" / "4")
    training.train(tiny_config(**fields, log__profile_steps=(0, 2)), run)  # resumes at 2
    assert list((run / "profile").rglob("*.xplane.pb"))


def test_a_second_training_in_the_same_directory_is_refused(dataset, tmp_path):
    config = tiny_config(data__path=str(dataset))
    with only_writer(tmp_path / "run"), pytest.raises(UserError, match="another `cem train`"):
        training.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()  # since it would be empty
    training.train(config, tmp_path / "run")


def test_a_directory_that_cannot_be_made_is_reported(dataset, tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"--workdir .* cannot be made"):
            training.train(tiny_config(data__path=str(dataset)), workdir)


def lose_lists(run):
    for path in run.glob("checkpoints/*/checksums.sha256"):
        path.unlink()
    return "these were complete once, and have no checksums.sha256 now: 6, 8"


def lose_checkpoints(run):
    shutil.rmtree(run / "checkpoints")
    return "reaches step 8"


def put_a_file_there(run):
    lose_checkpoints(run)
    (run / "checkpoints").write_text("")
    return "checkpoints: is a file"


@pytest.mark.parametrize("lose", [lose_lists, lose_checkpoints, put_a_file_there])
def test_a_run_that_lost_its_checkpoints_does_not_restart(lose, dataset, whole, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "run")
    message = lose(run)
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    with pytest.raises(UserError, match=message):
        training.train(tiny_config(data__path=str(dataset)), run)
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*")}


def test_a_run_without_a_finished_save_may_restart(tmp_path):
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    write = '{"step": %d, "kind": "train"}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(write % step for step in range(1, 7)))
    require_nothing_lost(tmp_path, [], tiny_config())  # a save after 3 steps, another after 6
    (tmp_path / "metrics.jsonl").write_text(write % 7)
    with pytest.raises(UserError, match="reaches step 7"):
        require_nothing_lost(tmp_path, [], tiny_config())


def test_a_run_directory_that_is_removed_during_the_run(dataset, tmp_path, monkeypatch):
    unpatched = loop.Loop._save

    def save(self, state, position, metric):
        if position.step == 3:
            (tmp_path / "run").rename(tmp_path / "away")
            (tmp_path / "run").mkdir()
        unpatched(self, state, position, metric)

    monkeypatch.setattr(loop.Loop, "_save", save)
    with pytest.raises(RunFailed, match=r"config.json is gone; the directory was removed"):
        training.train(tiny_config(data__path=str(dataset)), tmp_path / "run")


def test_the_final_checkpoint_competes_by_the_measure_of_the_others(whole):
    final = Reader(whole[0] / "checkpoints").info(8)
    lines = [line for line in read_metrics(whole[0]) if line["kind"] == "eval"]
    assert final.measure == "validation: 8 windows of 32 tokens"
    assert lines[-1]["tokens"] > 8 * 32 and final.metric != lines[-1]["loss"]


def test_training_learns(whole):
    losses = [line["loss"] for line in read_metrics(whole[0]) if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.3


def test_what_a_killed_writer_left_is_cleared(dataset, tmp_path):
    for name in (".config.json.13", ".tokenizer.model.7", ".metrics.jsonl.8", ".config.json.old"):
        (tmp_path / name).write_text("")
    training.train(tiny_config(data__path=str(dataset), train__steps=1), tmp_path)
    assert [p.name for p in tmp_path.glob(".*")] == [".config.json.old"]


def test_a_deep_config_gives_no_traceback(dataset, tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        training.train(tiny_config(data__path=str(dataset), train__steps=1), tmp_path)


def test_the_first_lines_announce_the_run(dataset, tmp_path):
    told = io.StringIO()
    training.train(tiny_config(data__path=str(dataset), train__steps=1), tmp_path, stream=told)
    lines = told.getvalue().splitlines()
    assert lines[0].startswith("starting at step 0 of 1 in ")
    assert re.fullmatch(r"compiling, then [\d.e-]+ TFLOP per step", lines[1])


def test_the_checkpoints_record_overrides_an_edited_config(dataset, whole, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "run")
    config = tiny_config(data__path=str(dataset))
    path = run / "config.json"
    original = path.read_text()
    edited = json.loads(original)
    edited["model"]["attention"]["tau"] = "3.5"
    path.write_text(json.dumps(edited))
    with pytest.raises(UserError, match=r"model\.attention\.tau: 'sqrt_head_dim' -> '3\.5'"):
        training.train(tiny_config(data__path=str(dataset), model__attention__tau="3.5"), run)
    told = io.StringIO()
    assert training.train(config, run, stream=told)["step"] == 8
    assert "model.attention.tau: '3.5' -> 'sqrt_head_dim'" in told.getvalue()
    assert path.read_text() == original


def test_a_resume_lists_the_checkpoints_once(dataset, whole, monkeypatch):
    listings, unpatched = [], checkpoints.entries
    monkeypatch.setattr(checkpoints, "entries", lambda d: listings.append(d) or unpatched(d))
    assert training.train(tiny_config(data__path=str(dataset)), whole[0])["step"] == 8
    assert len(listings) == 1


@pytest.mark.parametrize(
    ("done", "fields", "late", "due"),
    [
        (1, {}, False, Due()),
        (3, {}, False, Due(save=True)),
        (4, {}, False, Due(validation=True)),
        (8, {}, False, Due(save=True, validation=True)),
        (1, {}, True, Due(save=True)),
        (5, dict(checkpoint__keep_every=5), False, Due(save=True)),
        (2, dict(log__energies_every=2), False, Due(energies=True)),
    ],
)
def test_what_is_due_after_a_step(done, fields, late, due):
    config = tiny_config(**fields)
    assert due_after(done, 8, config, signal=0, late=late) == due
    stopped = due_after(done, 8, config, signal=15, late=late)
    assert stopped == due._replace(save=True, signal=15)

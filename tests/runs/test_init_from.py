"""`cem train --init-from RUN`: parameters taken and not taken, and the report of them."""

import io
import json
import shutil

import jax
import numpy as np
import pytest
from tiny import tiny_config

from cem_jax.errors import UserError
from cem_jax.runs import training
from cem_jax.runs.init_from import initialised_from, require_origin
from cem_jax.runs.metrics import read_metrics
from cem_jax.runs.position import Position
from cem_jax.runs.run import Run
from cem_jax.runs.setup import prepare_run
from cem_jax.train.setup import fresh_state

SHORT = dict(train__steps=2, eval__every=100, model__layers=1)


@pytest.fixture(scope="module")
def origin(dataset, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("origin") / "run"
    training.train(tiny_config(data__path=str(dataset), **SHORT), workdir)
    return workdir


def begun(dataset, origin, **changes):
    """Return (parameters at step 0, reported lines, record)."""
    setup = prepare_run(tiny_config(data__path=str(dataset), **(SHORT | changes)))
    told = []
    state, record = initialised_from(setup, str(origin), told.append)
    fresh = fresh_state(setup.config, setup.state)
    assert int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, fresh.opt_state)
    return state.params, fresh.params, told, record


def test_all_parameters_of_a_like_model_are_taken_bit_for_bit(dataset, origin):
    params, _, told, record = begun(dataset, origin, seed=5)
    jax.tree.map(np.testing.assert_array_equal, params, Run.open(origin).parameters)
    count = len(jax.tree.leaves(params))
    assert told == [f"{count} of {count} parameters from checkpoint 2 of {origin}"]
    assert record["fresh"] == record["unused"] == []


def test_what_does_not_match_is_listed_and_fresh(dataset, origin):
    changed = dict(
        model__mlp__dim=64,
        model__attention__diagonal="none",
        model__attention__learn_step_size=True,
    )
    params, fresh, told, record = begun(dataset, origin, **changed)
    theirs = Run.open(origin).parameters
    np.testing.assert_array_equal(params["embedding"], theirs["embedding"])
    tied = params["blocks"]["mlp"]["tied"]
    np.testing.assert_array_equal(tied, fresh["blocks"]["mlp"]["tied"])
    text = "\n".join(told)
    assert "blocks/mlp/tied: float32[1, 48, 32] there, float32[1, 64, 32] here" in text
    assert "not used: blocks/attention/diagonal: float32[1, 32] there, absent here" in text
    assert "blocks/mlp/tied" in record["fresh"] and len(record["fresh"]) >= 3
    assert record["unused"] == ["blocks/attention/diagonal"]


def test_nothing_in_common_is_refused(dataset, origin):
    other = dict(model__dim=64, model__attention__heads=4, model__attention__diagonal="none",
                 model__attention__self_bias=False)  # fmt: skip
    with pytest.raises(UserError, match="no parameter of its checkpoint 2 has the name and shape"):
        begun(dataset, origin, **other)


def test_the_new_run_records_it_and_resumes_without(dataset, origin, tmp_path):
    config = tiny_config(data__path=str(dataset), **SHORT, seed=3)
    workdir = tmp_path / "run"
    first = training.train(config, workdir, init_from=str(origin), stream=io.StringIO())
    event = read_metrics(workdir)[0]
    assert (event["step"], event["event"], event["from"]) == (0, "initialised", str(origin))
    assert json.loads((workdir / "config.json").read_text())["seed"] == 3
    told = io.StringIO()
    assert training.train(config, workdir, init_from=str(origin), stream=told) == first
    assert f"--init-from {origin} is not read again" in told.getvalue()
    assert training.train(config, workdir, stream=io.StringIO()) == first
    with pytest.raises(UserError, match=f"it began with {origin}; leave --init-from out"):
        training.train(config, workdir, init_from=str(tmp_path), stream=io.StringIO())


def test_a_run_with_fresh_parameters_is_not_restarted_with_others(dataset, origin, tmp_path):
    config = tiny_config(data__path=str(dataset), **SHORT)
    with pytest.raises(UserError, match=r"has a checkpoint .* began with fresh parameters"):
        training.train(config, origin, init_from=str(tmp_path))
    require_origin(origin, Position(2), str(tmp_path), [].append)  # of a run that recorded nothing


def test_an_export_must_be_imported_first(dataset, tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"cem import --input .*/export --workdir RUN"):
        begun(dataset, tmp_path / "export")


def test_no_run_there(dataset, origin, tmp_path):
    for path, message in {
        tmp_path / "nowhere": "nowhere: no such directory",
        tmp_path: "not the directory of a run: it has no checkpoints/",
        origin / "config.json": f"a part of one; name the run's directory, {origin}$",
        origin / "checkpoints": f"a part of one; name the run's directory, {origin}$",
        origin / "checkpoints" / "2": f"a part of one; name the run's directory, {origin}$",
    }.items():
        run = tmp_path / "p" / "q" / "run"
        with pytest.raises(UserError, match=message):
            training.train(tiny_config(data__path=str(dataset), **SHORT), run, init_from=str(path))
        assert not (tmp_path / "p").exists()


def test_a_run_killed_before_its_first_save_is_not_begun_afresh(dataset, origin, tmp_path):
    config = tiny_config(data__path=str(dataset), **SHORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "write_run_files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            training.train(config, tmp_path, init_from=str(origin), stream=io.StringIO())
    shutil.copytree(origin, tmp_path / "another")
    for init_from in (None, str(tmp_path / "another")):
        with pytest.raises(UserError, match=f"begun with --init-from {origin} and has no check"):
            training.train(config, tmp_path, init_from=init_from)
    assert training.train(config, tmp_path, init_from=str(origin))["step"] == 2

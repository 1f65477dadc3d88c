"""Opening run directories, and errors where there is none."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import sentences, tiny_config, tiny_parameters, tiny_tokenizer, write_run

from cem_jax.data.corpus.tokenizer_training import train_model
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError
from cem_jax.runs.run import Run


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def workdir(tmp_path, tokenizer):
    config = tiny_config()
    steps = {step: tiny_parameters(config, seed=step) for step in (3, 7)}
    return write_run(tmp_path / "run", config, tokenizer, steps)


def test_a_run_that_demanded_its_accelerators_kernel_opens_anywhere(tmp_path, tokenizer):
    demanded = tiny_config(model__attention__implementation="pallas")
    steps = {1: tiny_parameters(demanded)}
    run = Run.open(write_run(tmp_path / "run", demanded, tokenizer, steps))
    assert run.trained == demanded
    assert run.config == tiny_config(model__attention__implementation="auto")


def files_of(folder):
    return sorted(path for path in folder.rglob("*"))


def test_the_newest_checkpoint_or_the_one_asked_for(workdir, tokenizer):
    before = files_of(workdir)
    for asked, expected in ((None, 7), (3, 3), (np.int64(3), 3), (jnp.int32(3), 3)):
        run = Run.open(workdir, asked)
        assert run.config == tiny_config() and run.tokenizer.hash == tokenizer.hash
        assert run.step == expected and type(run.step) is int
        jax.tree.map(
            np.testing.assert_array_equal,
            run.parameters,
            tiny_parameters(run.config, seed=expected),
        )
    assert files_of(workdir) == before


def test_an_unknown_step_lists_the_existing_ones(workdir):
    with pytest.raises(UserError, match=r"no complete checkpoint 5 .*there are: 3, 7"):
        Run.open(workdir, 5)


@pytest.mark.parametrize("step", [3.0, "3", True, np.array([3])])
def test_a_step_is_an_integer(workdir, step):
    with pytest.raises(UserError, match="step: expected an integer or None, got"):
        Run.open(workdir, step)


def test_no_checkpoint_yet(tmp_path, tokenizer):
    workdir = write_run(tmp_path / "run", tiny_config(), tokenizer, {})
    with pytest.raises(UserError, match="there is none at all"):
        Run.open(workdir)
    assert sorted(path.name for path in workdir.iterdir()) == ["config.json", "tokenizer.model"]


def test_directories_that_are_no_run(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config.json, only nothing"):
        Run.open(tmp_path)
    (tmp_path / "dataset.json").touch()
    with pytest.raises(UserError, match=r"no config.json, only dataset.json"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: not JSON"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"seed": -1}))
    with pytest.raises(UserError, match=r"config.json: seed: .*\n.*model: missing"):
        Run.open(tmp_path)


def test_another_tokenizer_is_refused_with_both_hashes(workdir, tokenizer):
    other = Tokenizer(train_model(sentences(200, seed=5), 320))
    (workdir / "tokenizer.model").write_bytes(other.model_bytes)
    with pytest.raises(UserError) as refused:
        Run.open(workdir)
    assert tokenizer.hash in str(refused.value) and other.hash in str(refused.value)


def test_a_tokenizer_larger_than_the_model(tmp_path, tokenizer):
    config = tiny_config(model={"vocab_size": 300})
    workdir = write_run(tmp_path / "run", config, tokenizer, {1: tiny_parameters(config)})
    with pytest.raises(UserError, match=r"320 pieces, more than model.vocab_size = 300"):
        Run.open(workdir)


def test_a_missing_tokenizer(workdir):
    (workdir / "tokenizer.model").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.model cannot be read"):
        Run.open(workdir)


def test_parameters_of_another_architecture(workdir):
    changed = tiny_config(model={"layers": 3})
    (workdir / "config.json").write_text(json.dumps(changed.to_dict()))
    with pytest.raises(UserError, match="holds another model's state"):
        Run.open(workdir)


@pytest.mark.parametrize("text", ["null", "[1]", "3"])
def test_a_config_that_is_json_but_no_configuration(workdir, text):
    (workdir / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: expected sections of fields"):
        Run.open(workdir)


def test_a_directory_in_place_of_the_config(workdir):
    (workdir / "config.json").unlink()
    (workdir / "config.json").mkdir()
    with pytest.raises(UserError, match=r"config\.json: cannot be read: Is a directory"):
        Run.open(workdir)


def change_config(workdir, **fields):
    """Edit config.json; `model__dim` is model.dim."""
    path = workdir / "config.json"
    values = json.loads(path.read_text())
    for name, value in fields.items():
        *sections, leaf = name.split("__")
        section = values
        for key in sections:
            section = section[key]
        section[leaf] = value
    path.write_text(json.dumps(values))


@pytest.fixture
def recorded(tmp_path, tokenizer):
    """A run whose checkpoint recorded its configuration."""
    config = tiny_config()
    parameters = {3: tiny_parameters(config)}
    return write_run(tmp_path / "run", config, tokenizer, parameters, config=config.to_dict())


def test_the_checkpoints_own_model_is_opened_and_an_edited_field_is_named(recorded, capsys):
    before = Run.open(recorded)
    assert "warning" not in capsys.readouterr().err
    change_config(recorded, model__attention__tau="3.5", data__context=8)
    run = Run.open(recorded)
    assert run.config == before.config == tiny_config()
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json is not what checkpoint 3 was trained with" in line
    assert "model.attention.tau: '3.5' -> " in line and "data.context: 8 -> 16" in line


def test_fields_that_change_no_result_come_from_config_json(recorded, capsys):
    change_config(recorded, data__path="/elsewhere", model__attention__implementation="dense")
    config = Run.open(recorded).config
    assert config.data.path == "/elsewhere" and config.model.attention.implementation == "dense"
    assert "warning" not in capsys.readouterr().err


def test_another_architecture_in_config_json_is_named_too(recorded, capsys):
    change_config(recorded, model__layers=3)
    assert Run.open(recorded).config.model.layers == tiny_config().model.layers
    assert "model.layers: 3 -> " in capsys.readouterr().err

"""Grids: the runs of a figure, the identity of runs, and overrides for all of them."""

import dataclasses
import shlex

import pytest
from tiny_figure import write_figure

from cem_jax.cli import parse_arguments
from cem_jax.config import Config, load_config
from cem_jax.errors import UserError
from cem_jax.studies.figures.grid import at_rates, identity, read_sweep, runs_of
from cem_jax.studies.figures.sweep import command


@pytest.fixture
def figure(tmp_path):
    return lambda **given: write_figure(tmp_path, **given)


def messages(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return caught.value.messages


def test_every_arm_rate_and_seed_once(figure):
    sweep = read_sweep(figure(fields="rates=(0.5, 1, 2),"))
    runs = runs_of([sweep, sweep], range(2))
    assert len({run.name for run in runs}) == len(runs) == 2 * 3 * 2
    assert [run.seed for run in runs] == [0] * 6 + [1] * 6  # one seed after another
    assert {run.config.optimizer.learning_rate for run in runs} == {0.005, 0.01, 0.02}
    assert all(run.config.data.shuffle_seed == run.seed for run in runs)
    assert len({run.key for run in runs}) == 6  # apart from seeds


def test_some_of_the_rates(figure):
    sweeps = [read_sweep(figure(fields="rates=(0.5, 1, 2),")), read_sweep(figure(name="other"))]
    all_of_them = {run.name for run in runs_of(sweeps)}
    some = runs_of(at_rates(sweeps, [2, 0.5]))
    assert {run.config.optimizer.learning_rate for run in some} == {0.005, 0.02}
    assert len(some) == 4 and {run.name for run in some} < all_of_them
    (told,) = messages(at_rates, sweeps, [1, 3])
    assert told == "--rates 3: no figure has it; there are 0.5, 1, 2"


def test_the_size_stands_in_the_path_or_in_a_flag(figure):
    path = figure()
    assert list(read_sweep(path).arms) == ["small"]
    assert list(read_sweep(f"{path}:large").arms) == ["large"]
    assert list(read_sweep(path, "large").arms) == ["large"]
    assert list(read_sweep(f"{path}:large", "large").arms) == ["large"]
    (text,) = messages(read_sweep, f"{path}:large", "huge")
    assert "--size huge contradicts it" in text


def test_identity_is_what_is_trained(figure):
    (run, other) = runs_of([read_sweep(figure())])
    same = {"data.path": "/somewhere", "checkpoint.every": 7, "seed": 5, "data.shuffle_seed": 5}
    changed = {"model.attention.steps": 2, "optimizer.learning_rate": 0.5, "train.steps": 4}
    with_field = lambda name, value: Config.from_dict(run.config.to_dict(), {name: value})
    for name, value in same.items():
        assert identity(with_field(name, value)) == identity(run.config), name
    for name, value in changed.items():
        assert identity(with_field(name, value)) != identity(run.config), name
    assert identity(run.config) != identity(other.config)


def test_the_printed_command_makes_the_same_run(figure, tmp_path):
    more = (
        'cem.model.attention.tau = "2.5"; cem.train.microbatch = 2; cem.log.profile_steps = (1, 2)'
    )
    for run in runs_of([read_sweep(figure(more=more))], (3,), [("data.path", "a b")]):
        program, *arguments = shlex.split(command(run, str(tmp_path)))
        assert program == "cem"
        args = parse_arguments(arguments)
        assert args.command == "train"
        assert args.workdir == str(tmp_path / run.name)
        assert load_config(args.config, args.overrides) == run.config


def test_what_is_compared_cannot_be_set_for_all(figure):
    sweep = read_sweep(figure(fields="rates=(1, 2),"))
    given = [
        ("model.attention.kind", "cem"),
        ("optimizer.learning_rate", "0.1"),
        ("seed", "3"),
        ("train.steps", "9"),
    ]
    told = messages(runs_of, [sweep], (0,), given)
    assert [text.partition(":")[0] for text in told] == [name for name, _ in given[:3]]
    assert "--seeds N" in told[2]
    assert {run.config.train.steps for run in runs_of([sweep], (0,), given[3:])} == {9}


def test_a_field_for_all_runs_changes_their_names(figure):
    sweep = read_sweep(figure())
    names = lambda *given: {run.name for run in runs_of([sweep], (0,), given)}
    assert not names() & names(("data.context", "64"))
    assert names() == names(("log.every", "7"))  # does not change what is trained


def test_mistakes_are_told_once_and_all(figure):
    more = "cem.model.attention.heads = 3; cem.optimizer.b1 = 2.0"
    told = messages(runs_of, [read_sweep(figure(more=more, fields="rates=(1, 2),"))], range(3))
    assert len(told) == 2
    assert "model.attention.heads: 3 does not divide model.dim 16" in told[1]


def test_a_file_without_a_sweep(figure, tmp_path):
    path = tmp_path / "none.py"
    path.write_text("def get_sweep():\n    return 3\n")
    assert messages(read_sweep, str(path)) == (f"{path}: get_sweep() must return a Sweep, not int",)
    path.write_text("x = 1\n")
    assert messages(read_sweep, str(path)) == (f"{path}: defines no function get_sweep()",)


def test_arms_of_several_figures_are_evaluated_for_all_of_them(figure, tmp_path):
    sweep = read_sweep(figure())
    steps = dataclasses.replace(sweep, name="other", evaluate_steps=(1, 4))
    (llama, cem) = runs_of([sweep, steps])
    assert (llama.evaluate_steps, cem.evaluate_steps) == ((), (1, 4))
    assert [use.figure for use in cem.uses] == ["mine", "other"]

"""Config overrides among a command's arguments."""

import pytest

from cem_jax.commands.arguments import split_overrides


def test_split_overrides():
    rest, pairs, problems = split_overrides(
        ["train", "--config", "c.py", "--config.a=1", "--config.b.c", "-2", "--config.d=", "x"]
    )
    assert rest == ["train", "--config", "c.py", "x"]
    assert pairs == [("a", "1"), ("b.c", "-2"), ("d", "")]
    assert problems == []


@pytest.mark.parametrize("after", [[], ["--json"], ["--config.b=1"]])
def test_a_bare_flag_is_not_true(after):
    _, pairs, problems = split_overrides(["--config.model.scan_layers", *after])
    assert "model.scan_layers" not in dict(pairs)
    assert problems == [
        "--config.model.scan_layers: needs a value: --config.model.scan_layers=VALUE"
    ]

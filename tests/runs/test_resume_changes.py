"""Resuming with another batch, context or schedule: the rule and its messages."""

import io
from pathlib import Path

import numpy as np
import pytest
from stopped import stop_after
from tiny import tiny_config

from cem_jax.data.dataset.loader import TrainLoader
from cem_jax.data.dataset.mixture import single
from cem_jax.data.dataset.store import open_dataset
from cem_jax.errors import UserError
from cem_jax.runs import loop, training
from cem_jax.runs.metrics import read_metrics
from cem_jax.runs.position import Position
from cem_jax.runs.resume import Course, changes, report_changes, require_steps_left

CONTEXT_32 = {"data": {"context": 32}}
AT_3 = Position(3, tokens=3 * 4 * 32, windows_consumed=12, config=CONTEXT_32)
SHORT = dict(model__layers=1, checkpoint__every=3, eval__every=100)


def test_nothing_is_reported_if_nothing_changed():
    config = tiny_config()
    assert report_changes(AT_3, config, tiny_config(checkpoint__keep=5, mesh__fsdp=2)) == []
    assert changes(config, tiny_config(optimizer__b1=0.8)) == {"optimizer.b1": (0.9, 0.8)}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            dict(train__global_batch=8),
            "step 3 begins with window 12 of the order, the first unseen",
        ),
        (dict(data__context=16), "step 3 begins with window 24 of the order, after as many"),
        (dict(train__steps=20), "last step 8 -> 20"),
        (dict(optimizer__learning_rate=0.001), "learning_rate: 0.002 -> 0.001 from step 3 on"),
    ],
)
def test_changes_are_reported_with_numbers(fields, told):
    lines = report_changes(AT_3, tiny_config(), tiny_config(**fields))
    assert any(told in line for line in lines), lines


@pytest.mark.parametrize(("context", "number"), [(32, 12), (16, 24), (48, 8), (64, 6)])
def test_windows_of_another_length_continue_after_as_many_tokens(context, number):
    assert Course.of(AT_3, tiny_config(data__context=context)).window == number


@pytest.mark.parametrize(
    ("batch", "end", "ahead"),
    [(4, 8, 0.0), (8, 6, -2.0), (2, 12, 4.0), (16, 5, -3.0)],
)
def test_with_tokens_a_run_ends_when_they_are_seen(batch, end, ahead):
    tokens = dict(train__steps=None, train__tokens=8 * 4 * 32, train__global_batch=batch)
    config = tiny_config(**tokens)
    course = Course.of(Position(4, tokens=4 * 4 * 32), config)
    assert (course.total, course.ahead) == (end, ahead)
    assert course.tokens(4, config) == 4 * 4 * 32
    assert course.tokens(5, config) == 4 * 4 * 32 + batch * 32
    fresh = Course.of(Position(0, tokens=0), config)
    assert (fresh.total, fresh.ahead) == (32 // batch, 0.0)


def test_changes_are_reported_in_tokens():
    tokens = dict(train__steps=None, train__tokens=8 * 4 * 32)
    before, now = (tiny_config(**tokens, train__global_batch=batch) for batch in (4, 8))
    at = Position(4, tokens=512, windows_consumed=16, config=CONTEXT_32)
    lines = report_changes(at, before, now)
    assert any("at 512 of 1,024 tokens" in line and "last step 8 -> 6" in line for line in lines)
    with pytest.raises(UserError, match=r"512 tokens, .*ends at 400 tokens; raise train.tokens"):
        fewer = tiny_config(**(tokens | dict(train__tokens=400)))
        require_steps_left(Path("run"), at, before, fewer)


def test_a_run_resumes_with_another_batch_and_schedule(dataset, tmp_path, monkeypatch):
    data = dict(data__path=str(dataset), **SHORT)
    seen = consumed_windows(monkeypatch)
    with pytest.raises(SystemExit):
        training.train(tiny_config(**data), tmp_path / "run", **stop_after(3))
    told = io.StringIO()
    changed = tiny_config(**data, train__global_batch=8, train__steps=6)
    training.train(changed, tmp_path / "run", stream=told)
    assert "train.global_batch: 4 -> 8 from step 3 on" in told.getvalue()
    lines = read_metrics(tmp_path / "run")
    events = [(e["step"], e["field"], e["before"], e["after"]) for e in lines if "field" in e]
    assert events == [(3, "train.steps", 8, 6), (3, "train.global_batch", 4, 8)]
    tokens = [line["tokens"] for line in lines if line["kind"] == "train"]
    assert tokens == [128, 256, 384, 640, 896, 1152]  # 4 × 32 per step, then 8 × 32
    order = TrainLoader(single(open_dataset(str(dataset))), context=32, global_batch=1, seed=0)
    rows = [order.batch(number)["tokens"][0] for number in range(36)]
    np.testing.assert_array_equal(np.concatenate(seen), rows)  # none repeated or skipped
    again = io.StringIO()
    assert training.train(changed, tmp_path / "run", stream=again)["step"] == 6
    assert "from step" not in again.getvalue()
    with pytest.raises(UserError) as refused:  # no steps are left
        training.train(tiny_config(**data, train__steps=5, train__global_batch=8), tmp_path / "run")
    assert "is at step 6" in str(refused.value) and "train.steps: 6 -> 5" in str(refused.value)


def consumed_windows(patch):
    """Record the batches as they are placed on the devices."""
    seen, unpatched = [], loop.place_batch

    def place(batch, mesh):
        seen.append(np.array(batch["tokens"]))
        return unpatched(batch, mesh)

    patch.setattr(loop, "place_batch", place)
    return seen

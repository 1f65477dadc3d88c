"""Progress lines, tables, numbers and JSON values as all commands write them."""

import dataclasses
import io
import json
from pathlib import Path
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.text import (
    Pace,
    ProgressLine,
    aligned,
    format_count,
    format_duration,
    format_mb,
    format_mib,
    format_rate,
    plain,
)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


def test_a_line_now_and_then_where_there_is_no_terminal(clock):
    stream = io.StringIO()
    line = ProgressLine(stream, every=5.0, clock=clock)
    for step in range(12):
        if line.is_due():
            line.show(f"step {step}", "ETA 0:01")
        clock.now += 1.0
    line.finish()
    assert stream.getvalue() == "step 5  ETA 0:01\nstep 10  ETA 0:01\n"


def test_a_first_line_at_once(clock):
    assert ProgressLine(io.StringIO(), at_once=True, clock=clock).is_due()


def test_one_line_moves_on_a_terminal(clock):
    stream = Terminal()
    line = ProgressLine(stream, at_once=True, clock=clock)
    line.show("step 1", "a longer line")
    assert not line.is_due()
    clock.now += 0.5
    assert line.is_due()
    line.show("step 2")
    line.message("a message")
    line.finish()
    assert stream.getvalue() == "\rstep 1  a longer line\rstep 2               \na message\n"


def test_a_line_is_cleared(clock):
    stream = Terminal()
    line = ProgressLine(stream, clock=clock)
    line.show("12345")
    line.clear()
    line.finish()
    assert stream.getvalue() == "\r12345\r     \r"


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "step 9/10  loss 3.214  lr 1.9e-3  12.3k tok/s  ETA 0:08"),
        (56, "step 9/10  loss 3.214  lr 1.9e-3  12.3k tok/s  ETA 0:08"),
        (55, "step 9/10  loss 3.214  lr 1.9e-3  ETA 0:08"),
        (40, "step 9/10  loss 3.214  ETA 0:08"),
        (20, "step 9/10  ETA 0:08"),
        (12, "step 9/10 …"),
    ],
)
def test_lines_are_cut_to_the_terminal(columns, shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    line = ProgressLine(stream)
    line.show("step 9/10", "loss 3.214", "lr 1.9e-3", "12.3k tok/s", "ETA 0:08")
    assert stream.getvalue() == f"\r{shown}" and len(shown) < columns


def test_the_pace_leaves_out_what_came_before_the_first_call(clock):
    pace = Pace(100, clock=clock)
    clock.now += 60.0
    assert pace.per_second(10) is None and pace.seconds_left(10) is None
    clock.now += 30.0
    assert pace.per_second(40) == pytest.approx(1.0)
    assert pace.seconds_left(40) == pytest.approx(60.0)
    assert pace.seconds_left(100) == 0.0


def test_columns_are_aligned():
    assert aligned([("name", "count", ""), ("a", "1,234", "ok"), ("longer", "5", "")], "<><") == (
        "name    count\na       1,234  ok\nlonger      5"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.4, "0"),
        (87, "87"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (12_345, "12.3k"),
        (999_400, "999k"),
        (1_254_000, "1.25M"),
        (3.2e12, "3.20T"),
        (8.2606e12, "8.26T"),
        (9.9999e14, "1.00P"),
        (1.0367e18, "1.04E"),
    ],
)
def test_counts(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (754, "12:34"),
        (3723, "1:02:03"),
        (183_845, "2d 03:04:05"),
        (None, "?"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_rates():
    assert [format_rate(r) for r in (0.0, 1.0, 1.9e-3, 2e-12)] == [
        "0.0e0",
        "1.0e0",
        "1.9e-3",
        "2.0e-12",
    ]


def test_sizes():
    assert (format_mb(1_234_567_890), format_mib(2**31), format_mib(None)) == (
        "1,234.6",
        "2,048.0",
        "",
    )


@dataclasses.dataclass
class Record:
    path: Path
    pair: tuple


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Record(Path("/a"), (1, float("nan"))), {"path": "/a", "pair": [1, None]}),
        ({1: np.float32(0.5), "x": jnp.inf}, {"1": 0.5, "x": None}),
        (MappingProxyType({"x": True}), {"x": True}),
        ([np.int64(3), np.bool_(True), None, "text"], [3, True, None, "text"]),
        (jnp.asarray([[1.0, jnp.nan]], jnp.bfloat16), [[1.0, None]]),
    ],
)
def test_plain_values(value, expected):
    found = plain(value)
    assert found == expected and json.loads(json.dumps(found, allow_nan=False)) == expected


def test_other_values_are_refused():
    with pytest.raises(TypeError, match="numbers or text, not object"):
        plain({"x": object()})

import io

import pytest

from cem_jax.runs.progress import Progress, Throughput


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


def run(rate, clock, steps, seconds=2.0, wait=0.0):
    for _ in range(steps):
        with rate.waiting():
            clock.sleep(wait)
        clock.sleep(seconds - wait)
        rate.step_done()


def test_nothing_is_known_before_the_second_step(clock):
    rate = Throughput(100, clock=clock)
    run(rate, clock, 1, seconds=60.0)
    assert rate.step_seconds is None
    assert rate.tokens_per_second is None
    assert rate.data_wait_fraction is None
    assert rate.seconds_ahead is None


def test_compilation_is_not_counted(clock):
    rate = Throughput(100, clock=clock)
    run(rate, clock, 1, seconds=60.0, wait=20.0)
    run(rate, clock, 5, seconds=2.0, wait=0.5)
    assert rate.step_seconds == pytest.approx(2.0)
    assert rate.tokens_per_second == pytest.approx(50.0)
    assert rate.data_wait_fraction == pytest.approx(0.25)
    assert rate.seconds_ahead == pytest.approx(2.0)


def test_pauses_count_only_for_the_eta(clock):
    rate = Throughput(100, clock=clock)
    run(rate, clock, 1)
    for _ in range(5):
        run(rate, clock, 10)
        with rate.paused():
            clock.sleep(30.0)
    assert rate.step_seconds == pytest.approx(2.0)
    assert rate.seconds_ahead == pytest.approx(2.0 + 3.0)


def test_stragglers_do_not_count(clock):
    rate = Throughput(100, clock=clock)
    run(rate, clock, 1)
    for _ in range(10):
        run(rate, clock, 9)
        run(rate, clock, 1, seconds=100.0)
    assert rate.step_seconds == pytest.approx(2.0)


def test_the_recent_rate_counts(clock):
    rate = Throughput(100, clock=clock)
    run(rate, clock, 300, seconds=2.0)
    run(rate, clock, 100, seconds=1.0)
    assert rate.step_seconds == pytest.approx(1.0)


def test_eta_at_the_resumed_step(clock):
    progress = Progress(1000, 100, io.StringIO(), clock=clock)
    assert progress.eta_seconds(900) is None
    run(progress.rate, clock, 3)
    assert progress.eta_seconds(903) == pytest.approx(97 * 2.0)
    assert progress.eta_seconds(1000) == 0.0


def test_lines_come_every_few_seconds_and_at_the_end(clock):
    stream = io.StringIO()
    progress = Progress(8, 24_600, stream, every=5.0, clock=clock)
    for step in range(1, 9):
        run(progress.rate, clock, 1, seconds=2.0, wait=0.28)
        progress.update(step, loss=3.2144, learning_rate=0.0019)
    assert stream.getvalue().splitlines() == [
        "step 1/8  loss 3.214  lr 1.9e-3",
        "step 4/8  loss 3.214  lr 1.9e-3  12.3k tok/s  14 % of time waiting for data  ETA 0:08",
        "step 7/8  loss 3.214  lr 1.9e-3  12.3k tok/s  14 % of time waiting for data  ETA 0:02",
        "step 8/8  loss 3.214  lr 1.9e-3  12.3k tok/s  14 % of time waiting for data  ETA 0:00",
    ]


def test_work_between_steps_is_shown_as_often(clock):
    stream = io.StringIO()
    progress = Progress(10, 100, stream, every=5, clock=clock)
    progress.update(1, loss=1.0, learning_rate=1e-3)
    for batch in range(12):
        clock.sleep(1.0)
        progress.between(f"batch {batch}")
    assert stream.getvalue().splitlines()[1:] == ["batch 4", "batch 9"]


def test_one_line_moves_on_a_terminal(clock):
    stream = Terminal()
    progress = Progress(100, 100, stream, clock=clock)
    progress.update(1, loss=10.0, learning_rate=0.1)
    assert not progress.is_due()
    progress.update(2, loss=10.0, learning_rate=0.1)
    clock.sleep(1.0)
    assert progress.is_due()
    progress.update(3, loss=9.0, learning_rate=0.1)
    progress.message("validation loss 8.0")
    progress.finish()
    assert stream.getvalue() == (
        "\rstep 1/100  loss 10.000  lr 1.0e-1"
        "\rstep 3/100  loss 9.000  lr 1.0e-1 "
        "\nvalidation loss 8.0\n"
    )

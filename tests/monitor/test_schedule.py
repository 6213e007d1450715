"""The choice of measured steps under a cost bound, by a clock that the tests control."""

import itertools
import random

import pytest
import torch
from cases import loss_of
from setups import mlp

from adiv_monitor import Monitor, StepReport
from adiv_monitor.sinks import MemorySink
from adiv_monitor.step import schedule
from adiv_monitor.step.schedule import Schedule, StepTimes, Unasked


class Clock:
    """A clock that the test advances."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def passed(self, start: float, end: float) -> float:
        return end - start


class Run:
    """A run whose plain steps take `plain` seconds, and measured ones `cost` more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bounded: Schedule, start: int = 0) -> None:
        self.clock = Clock()
        monkeypatch.setattr(
            schedule, "step_times", lambda parameter: StepTimes(self.clock.now, self.clock.passed)
        )
        self.spent = 0.0
        self.measured = [start]
        self.step = start
        self._bounded = bounded
        bounded.begin(start, torch.ones(1))

    def steps(self, count: int, plain: float = 1.0, cost: float = 3.0) -> None:
        for _ in range(count):
            since = self.step - self.measured[-1]
            if since == 1:  # the report is made as the next step begins
                self._bounded.reported(self.measured[-1], self._bounded.planned)
            extra = {0: 2 / 3, 1: 1 / 3}.get(since, 0) * cost  # some of it in the step after it
            self.spent += extra
            self.clock.time += 0.25 * plain  # loads the batch
            if since == 0:
                self._bounded.forward_begins()
            self.clock.time += 0.75 * plain + extra
            self.step += 1
            if self._bounded.step_ended(self.step):
                self.measured.append(self.step)

    def intervals(self) -> list[int]:
        return [b - a for a, b in itertools.pairwise(self.measured)]


UNASKED = Unasked(0.01)  # no bound was asked for


@pytest.mark.parametrize(
    "every, bound, cost, measured",
    [
        (None, UNASKED, 0.5, [0, 10, *range(100, 1001, 100)]),
        (None, UNASKED, 3.0, [0, 10, 100, 500, 1000]),  # 3 · 99 = 297
        (None, UNASKED, 6.0, [0, 10, 100, 1000]),
        (None, 0.5, 3.0, [0, 10, *range(100, 1001, 100)]),
        (None, None, 6.0, [0, 10, *range(100, 1001, 100)]),
        (250, UNASKED, 6.0, [0, 250, 500, 750, 1000]),
        (250, None, 6.0, [0, 250, 500, 750, 1000]),
        (250, 0.01, 6.0, [0, 250, 500, 1000]),
        (250, 0.5, 6.0, [0, 250, 500, 750, 1000]),
        (1, 0.9, 6.0, [*range(0, 1001, 20)]),  # a comparison needs some plain steps
    ],
)
def test_which_steps_are_measured(
    every: int | None,
    bound: float | None,
    cost: float,
    measured: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, Schedule(every, bound))
    run.steps(1000, cost=cost)
    assert run.measured == measured


def test_a_slow_beginning_and_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps compile and fill caches; an evaluation may precede any step."""
    run = Run(monkeypatch, Schedule(50, 0.01))
    chance = random.Random(0)
    run.clock.time += 1000
    run.steps(1)
    run.steps(5, plain=60)
    for _ in range(4000):
        if chance.random() < 0.05:
            run.clock.time += 500
        run.steps(1)
    assert set(run.intervals()[2:]) == {400, 500}


def test_the_interval_follows_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, Schedule(50, 0.01))
    run.steps(2000)
    assert run.measured == [0, 50, 100, 500, 1000, 1500, 2000]
    run.steps(8000, plain=3.0)  # larger images: measuring them costs the same
    assert run.intervals()[-1] == 100
    run.steps(8000, cost=60.0)
    assert run._bounded.interval == 10_000


class Slow(MemorySink):
    """A sink that takes three times as long as a step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def write(self, report: StepReport) -> None:
        super().write(report)
        self._clock.time += 3


BOUNDS: list[tuple[float | None, float, list[tuple[int, int]]]] = [
    (None, 0, [(step, 20) for step in range(0, 172, 20)]),
    (0.05, 0, [(0, 20), (20, 20), (40, 100), (100, 100)]),  # 3 · 19 = 57
    (0.11, 0, [(0, 20), (20, 20), (40, 50), (100, 50), (150, 50)]),  # 3 · 8.1
    (0.07, 0, [(0, 20), (20, 20), (40, 50), (100, 50), (150, 50)]),  # 3 · 13.3 = 40
    (0.07, 100, [(0, 20), (20, 20), (40, 100), (100, 100)]),  # the pause counts as a fourth step
]


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("bound, pause, expected", BOUNDS)
def test_a_monitor_keeps_to_its_bound(
    bound: float | None,
    pause: float,
    expected: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(
        schedule,
        "step_times",
        lambda parameter: StepTimes(clock.now, clock.passed) if bound else 1 / 0,
    )
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = Slow(clock)
    monitor = Monitor(
        model, optimizer, every_n_steps=20, max_overhead=bound, sinks=[sink], on_error="raise"
    )
    with monitor:
        for _ in range(172):
            if monitor._controller._armed is not None:
                with torch.no_grad():
                    model(batch[0])  # evaluation
                clock.time += pause
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            clock.time += 1
            optimizer.step()
        saved = monitor.state_dict()
    assert [(report.step, report.interval) for report in sink.reports] == expected
    assert sink.reports[1].to_dict()["interval"] == 20
    assert len(saved["costs"]) == (len(expected) - 1 if bound else 0)
    resumed = Monitor(model, optimizer, every_n_steps=20, max_overhead=bound)
    resumed.load_state_dict(saved)
    assert resumed.state_dict()["costs"] == saved["costs"]


def test_a_device_that_lags_behind_is_not_waited_for() -> None:
    marks, reached = itertools.count(), set[int]()
    steps = StepTimes(lambda: next(marks), lambda start, end: 2.0 if end in reached else None)
    steps.begin()
    steps.forward_begins()
    for _ in range(7):
        steps.step_ended()
    for last in (0, 7, 8):
        reached |= {*range(last + 1)}
        assert steps.costs() == ([0.0] if last == 8 else [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_timing_never_synchronises() -> None:
    steps = schedule.step_times(torch.ones(1, device="cuda"))
    x = torch.randn(2000, 2000, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps.begin()
        steps.forward_begins()
        for number in range(7):
            for _ in range(18 if number == 0 else 3):
                x = x @ x / 100
            steps.step_ended()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert len(steps.costs()) == 1

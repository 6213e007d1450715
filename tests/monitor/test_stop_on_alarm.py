"""The preset alarms on healthy and faulty runs, and alarms that stop a run."""

import pickle
import warnings
from typing import Any

import pytest
import torch
from hooks import no_hooks
from plain_loops import climb
from torch import nn

from adiv_monitor import AdivError, AlarmError, Monitor
from adiv_monitor.rerun.thread import function_modes
from adiv_monitor.sinks import MemorySink


def run(kind: str, make: Any, poison: int | None = None) -> tuple[Monitor, list[str]]:
    """Run under the preset; return run and warnings. The loss is NaN from step `poison` on."""
    torch.manual_seed(0)
    model, shape = {
        "mlp": ((nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), (64, 8)),
        "cnn": (
            (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)),
            (64, 1, 8, 8),
        ),
    }[kind]
    model = nn.Sequential(*model)
    x, y = torch.randn(shape), torch.randint(3, (64,))
    optimizer, criterion = make(model.parameters()), nn.CrossEntropyLoss()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Monitor(
            model, optimizer, loss=criterion, every_n_steps=3, alarms="default"
        ) as monitor:
            for step in range(40):
                optimizer.zero_grad()
                part = slice(16 * (step % 4), 16 * (step % 4) + 16)
                loss = criterion(model(x[part]), y[part])
                (loss * (float("nan") if step == poison else 1)).backward()
                optimizer.step()
    return monitor, [str(warning.message) for warning in caught]


def sgd(lr: float, **options: Any) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


def adamw(lr: float) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("mlp", sgd(0.1)),
        ("mlp", adamw(0.01)),
        ("cnn", sgd(0.05, momentum=0.9)),
        ("cnn", adamw(0.003)),
    ],
)
def test_the_preset_raises_nothing_over_healthy_runs(kind: str, make: Any) -> None:
    monitor, said = run(kind, make)
    assert [alarm for made in monitor.reports for alarm in made.alarms] == []
    assert said == []


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(
    ("kind", "make", "poison", "rule"),
    [
        ("mlp", sgd(1e3), None, "update_ratio > 10"),
        ("mlp", sgd(1e30), None, "non_finite"),
        ("cnn", sgd(1e20), None, "non_finite"),
        ("mlp", sgd(0.1), 10, "non_finite"),
    ],
)
def test_the_preset_raises_something_over_runs_that_blow_up(
    kind: str, make: Any, poison: int | None, rule: str
) -> None:
    monitor, said = run(kind, make, poison=poison)
    assert rule in {alarm.rule for made in monitor.reports for alarm in made.alarms}
    assert any(rule in text for text in said)


# Alarms that stop


def test_it_raises_where_the_report_is_complete_and_leaves_no_hook() -> None:
    """The next optimizer step raises the error, which leaves the `with` block and no hook."""
    sink = MemorySink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AlarmError) as caught:
            climb(["1: update_cosine < 0"], on_alarm="stop", sinks=[sink])
    assert isinstance(caught.value, AdivError)
    assert not function_modes()
    (made,) = sink.reports
    assert made.step == 0 and caught.value.report == made
    assert caught.value.alarms == made.alarms and len(made.alarms) == 1
    assert str(caught.value) == f"step 0: {made.alarms[0]}"
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (copied.report, str(copied)) == (made, str(caught.value))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def take(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    model.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    if optimizer is not None:
        optimizer.step()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("place", ["step", "complete_report", "latest", "end_step", "compiled"])
def test_it_raises_wherever_a_report_is_completed(place: str, on_error: Any) -> None:
    model, optimizer = model_and_optimizer()
    rules = [lambda path, reading: path == "0"]
    options: Any = {"alarms": rules, "on_alarm": "stop", "every_n_steps": 1, "on_error": on_error}
    followed = None if place == "end_step" else optimizer
    called = torch.compile(model, backend="eager") if place == "compiled" else model
    monitor = Monitor(model, followed, **options)
    monitor.attach()
    take(called, followed)
    if place in ("step", "compiled"):
        take(called, None)  # up to the optimizer's step nothing is raised
    with pytest.raises(AlarmError):
        if place == "complete_report":
            monitor.complete_report()
        elif place == "latest":
            _ = monitor.latest
        elif place == "end_step":
            monitor.end_step()
        else:
            optimizer.step()
    assert no_hooks(model, optimizer), "though nobody has closed it yet"
    assert monitor.step == 1 and len(monitor.reports) == 1
    take(model, optimizer)
    assert len(monitor.reports) == 1, "it measures nothing more"
    monitor.close()
    with pytest.raises(AdivError, match="closed"):
        monitor.attach()


def test_the_last_reports_alarms_warn_where_the_monitor_is_closed() -> None:
    model, optimizer = model_and_optimizer()
    sink = MemorySink()
    options: Any = {"alarms": ["0: update_ratio > 0"], "on_alarm": "stop", "sinks": [sink]}
    with (
        pytest.warns(UserWarning, match="step 0: 0: 0: update_ratio > 0"),
        Monitor(model, optimizer, **options) as monitor,
    ):
        take(model, optimizer)
    assert [len(made.alarms) for made in sink.reports] == [1]
    assert monitor.latest == sink.reports[0]
    assert no_hooks(model, optimizer)

"""Callbacks accept the monitor's options, with the monitor's own defaults."""

from collections.abc import Callable
from inspect import signature
from typing import Any, get_type_hints

import pytest
from torch import nn
from torch.optim import SGD

from adiv_monitor import Monitor
from adiv_monitor.alignment import Probe
from adiv_monitor.callback_monitor import CallbackMonitor, CallbackOptions, Settings
from adiv_monitor.sinks import MemorySink

# Arguments of the monitor that a callback supplies itself.
MADE = {"model", "optimizer", "every_n_steps", "sinks", "loss", "keep"}


CALLBACKS = {"lightning": "DivergenceCallback", "huggingface": "DivergenceTrainerCallback"}


@pytest.fixture(params=CALLBACKS)
def callback(request: pytest.FixtureRequest) -> Any:
    module = pytest.importorskip(f"adiv_monitor.{request.param}", exc_type=ImportError)
    return getattr(module, CALLBACKS[request.param])


def test_every_option_has_the_monitors_default() -> None:
    monitors = signature(Monitor).parameters
    found = Settings.of("Callback", {}, every_n_steps=1).monitor
    given = {name: monitors[name].default for name in found.keys() & monitors.keys()}
    assert found == {**given, "max_overhead": None}
    assert monitors.keys() - MADE - CallbackOptions.__annotations__.keys() == {"alignment"}


def test_an_option_that_is_none_is_refused_at_once(callback: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{callback.__name__}\(\).*'max_row'$"):
        callback(max_row=3)


def test_what_is_given_replaces_the_default(callback: Callable[..., Any]) -> None:
    settings = callback(max_rows=7, seed=3, separator="_")._settings
    options = settings.monitor
    assert (options["max_rows"], options["seed"], options["on_error"]) == (7, 3, "warn")
    assert (settings.metrics.separator, settings.metrics.scalars) == ("_", "few")


def test_options_are_of_the_monitors_types() -> None:
    ours = get_type_hints(CallbackOptions)
    monitors = get_type_hints(Monitor.__init__, localns={"Probe": Probe})
    shared = ours.keys() & monitors.keys()
    assert ours.keys() - shared == {"measures", "scalars", "separator"}
    assert {name: ours[name] for name in shared} == {name: monitors[name] for name in shared}
    text = CallbackOptions.__doc__ or ""
    assert not [name for name in ours if f"`{name}`" not in text and f"{name}:" not in text]


def test_every_option_reaches_the_monitor() -> None:
    settings = Settings.of("Callback", {"layers": ["0"], "sinks": [MemorySink()]})
    made = {**settings.monitor, "layers": settings.layers, "sinks": settings.sinks}
    assert (
        made.keys() | {"measures", "scalars", "separator"} == CallbackOptions.__annotations__.keys()
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    CallbackMonitor(model, SGD(model.parameters()), **made)

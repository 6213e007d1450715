"""Callbacks accept the monitor's options, with the monitor's own defaults."""

from collections.abc import Callable
from inspect import Parameter, signature
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


@pytest.fixture(params=["lightning", "huggingface"])
def callback(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param == "lightning":
        pytest.importorskip("pytorch_lightning")
        from adiv_monitor.lightning import DivergenceCallback

        return DivergenceCallback
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from adiv_monitor.huggingface import DivergenceTrainerCallback

    return DivergenceTrainerCallback


def test_every_option_is_named_with_the_monitors_default(callback: Callable[..., Any]) -> None:
    ours, monitors = signature(callback).parameters, signature(Monitor).parameters
    assert CallbackOptions.__annotations__.keys() <= ours.keys()
    assert not [p for p in ours.values() if p.kind is Parameter.VAR_KEYWORD]
    for name in ours.keys() & monitors.keys() - {"every_n_steps"}:
        assert ours[name].default == monitors[name].default
        assert ours[name].kind is Parameter.KEYWORD_ONLY
    left_out = monitors.keys() - MADE - ours.keys()
    assert left_out <= {"alignment"}  # Hugging Face's Trainer provides no batch for it


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

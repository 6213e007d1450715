"""Exceptions and interrupts of the user's own code pass; non-finite numbers do no harm."""

import math
from collections.abc import Callable

import pytest
import torch
from faults.scenarios import SCENARIOS
from faults.trial import Fault, take, trained
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor import Monitor

NUMBERS = ("mlp", "deep", "whole", "checkpoints", "realised", "made", "recurrent", "attention")
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def spoil_gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.view(-1)[0] = value


def spoil_weights(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.view(-1)[0] = value


def spoilt(where: str, value: float, name: str) -> Callable[[nn.Module, Optimizer], Tensor]:
    """Return a step in which values become non-finite before or after forward, backward or step."""

    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        optimizer.zero_grad()
        if where == "weights":
            spoil_weights(model, value)
        handle = None
        if where == "activations":
            first = next(m for m in model.modules() if m is not model)
            handle = first.register_forward_hook(lambda m, a, out: _times(out, value))
        loss = SCENARIOS[name].loss(model)
        if handle is not None:
            handle.remove()
        if where == "loss":
            loss = loss * value
        loss.backward()
        if where == "gradients":
            spoil_gradients(model, value)
        optimizer.step()
        return loss.detach()

    return step


def _times(output: object, value: float) -> object:
    if isinstance(output, tuple):
        return (_times(output[0], value), *output[1:])
    assert isinstance(output, Tensor)
    return output * value


@pytest.mark.slow(one_in=37)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("where", ["loss", "gradients", "weights", "activations"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_not_finite(name: str, where: str, value: str) -> None:
    step = spoilt(where, VALUES[value], name)
    trial = take(SCENARIOS[name], step=step, on_error="raise")
    assert trial.raised is None, repr(trial.raised)
    assert not trial.left
    assert trial.result == trained(SCENARIOS[name], step=step)
    assert len(trial.reports) == 2
    said = [*trial.reports[0].notes, *trial.reports[0].unsupported.values()]
    assert any("finite" in text for text in said), said


class Stops(nn.Module):
    """A module that passes its input on, or raises an error at a given place."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.frozen.register_forward_hook(self._stop)
        self.error: BaseException | None = error
        self.place = "forward"

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.inner(x))
        self._stop_if("forward")
        if self.place == "backward" and x.requires_grad:
            x.register_hook(lambda gradient: self._stop_if("backward"))
        return x

    def _stop(self, *_: object) -> None:
        self._stop_if("frozen")

    def _stop_if(self, place: str) -> None:
        if self.place == place and self.error is not None:
            raise self.error


class Interrupted(torch.optim.SGD):
    """An optimizer whose step raises an error."""

    error: BaseException | None = None

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.error is not None:
            raise self.error
        super().step()


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("kind", [Fault, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("place", ["forward", "frozen", "backward", "step"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_what_the_users_code_raises_passes(
    place: str, kind: type[BaseException], goes_on: bool
) -> None:
    """Training may continue with the same monitor, which then measures the step as a new one."""
    from faults.trial import changed
    from faults.world import surroundings

    error = kind()
    model = Stops(error).double()
    model.place = place
    optimizer = Interrupted(model.parameters(), lr=0.1)
    optimizer.error = error if place == "step" else None
    before = surroundings(model, optimizer)
    x = torch.ones(3, 4, dtype=torch.float64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    monitor = Monitor(model, optimizer, on_error="raise", realised=True)
    monitor.attach()
    with pytest.raises(kind):
        step()
    if goes_on:
        model.error = optimizer.error = None
        step()
    monitor.close()
    assert changed(before, surroundings(model, optimizer)) == {}
    assert (monitor.latest is not None) == goes_on
    if monitor.latest is not None:
        reading = monitor.latest.layers["inner"]
        assert reading.rows_total == 3
        assert reading.kind == "linear"

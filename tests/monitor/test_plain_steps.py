"""Between measured steps the monitor does nothing that grows with the model."""

import gc
import sys
from contextlib import nullcontext
from itertools import cycle
from types import FrameType
from typing import Any

import pytest
import torch
from operations import Operations
from torch import nn

from adiv_monitor import Monitor
from adiv_monitor.step import stepping


def calls_of_a_plain_step(
    layers: int, *, monitored: bool, before: int = 3, **given: Any
) -> tuple[int, int]:
    """Return the operations of a step that is not measured, and the calls of our functions.

    Args:
        layers: the number of layers.
        monitored: whether there is a monitor.
        before: steps before it: the first is measured, the second completes its report.
        given: arguments of the monitor.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer, loss = torch.optim.AdamW(model.parameters()), nn.MSELoss()
    x, calls, losses = torch.randn(8, 4), 0, cycle(torch.tensor([1.0, 1.2, 1.1]))

    def step() -> None:
        optimizer.zero_grad()
        if given:
            monitor.log_loss(next(losses))
        loss(model(x), x).backward()
        optimizer.step()

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        code = frame.f_code
        is_ours = "/adiv_monitor/" in code.co_filename
        # One walk goes up the callers' stack, whose depth is theirs.
        walks = code.co_name == "<genexpr>" and code.co_filename == stepping.__file__
        calls += event == "call" and is_ours and not walks

    own = {"every_n_steps": 99, **given}
    with Monitor(model, optimizer, **own) if monitored else nullcontext() as monitor:
        for _ in range(before):
            step()
        with Operations() as operations:
            gc.disable()  # what other tests have left is not this step's
            sys.setprofile(count)
            try:
                step()
            finally:
                sys.setprofile(None)
                gc.enable()
    return operations.count, calls


@pytest.mark.parametrize("layers", [2, 9])
def test_a_step_that_is_not_measured_does_nothing_more(layers: int) -> None:
    operations, calls = calls_of_a_plain_step(layers, monitored=True)
    assert (operations, 0) == calls_of_a_plain_step(layers, monitored=False)
    assert calls == calls_of_a_plain_step(1, monitored=True)[1] <= 70


# The loss that is logged is read; norms take eight operations more, and look at each gradient.
@pytest.mark.parametrize(
    ("watch", "operations", "calls", "each"), [("loss", 1, 75, 0), ("norms", 9, 100, 1)]
)
def test_a_watched_step_does_as_much_at_any_depth(
    watch: str, operations: int, calls: int, each: int
) -> None:
    """Once there are losses enough to judge the next one by."""
    found = {n: calls_of_a_plain_step(n, monitored=True, before=60, watch=watch) for n in (2, 9)}
    plain = {n: calls_of_a_plain_step(n, monitored=False, before=1)[0] for n in (2, 9)}
    assert [found[n][0] - plain[n] for n in (2, 9)] == [operations] * 2
    parameters = 2 * (9 - 2)
    assert found[9][1] == found[2][1] + each * parameters
    assert found[2][1] <= calls


def operations_around_a_capture(
    monkeypatch: pytest.MonkeyPatch, *, monitored: bool
) -> tuple[list[int], list[int]]:
    """Return the operations of each step, of which a CUDA graph captures two; what is reported."""
    now = "is_current_stream_capturing"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, now, lambda: False)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)
    found = []
    with Monitor(model, optimizer, every_n_steps=1) if monitored else nullcontext() as monitor:
        for captures in (False, False, True, True, False, False, False):
            monkeypatch.setattr(torch.cuda, now, lambda captures=captures: captures)
            with Operations() as operations:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            found.append(operations.count)
    return found, [report.step for report in monitor.reports] if monitor else []


def test_what_a_cuda_graph_captures_is_left_alone_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host would end the capture; replays would move what is measured."""
    plain, _ = operations_around_a_capture(monkeypatch, monitored=False)
    with pytest.warns(UserWarning, match="captured in a CUDA graph, whose replays run no hooks"):
        ours, reported = operations_around_a_capture(monkeypatch, monitored=True)
    assert ours[2:4] == plain[2:4]
    assert reported == [0, 3, 4], "step 1 was waiting for the next one, which was captured"

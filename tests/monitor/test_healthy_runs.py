"""What a run is told at its end: nothing if it is healthy, and the same at every interval."""

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from made_records import reading
from setups import trained
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

from adiv_monitor import Monitor
from adiv_monitor.diagnosis.diagnose import LOSS_UNKNOWN, NOTHING, running_headline
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import StepReport
from adiv_monitor.sinks import TensorBoardSink

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
    "SGD": lambda model: SGD(model.parameters(), lr=0.1),
}


def perceptron(make: Callable[[nn.Module], Optimizer], *, knows_loss: bool) -> Monitor:
    """Train a small perceptron that learns well."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    )
    x = torch.randn(512, 20)
    labels, optimizer = x[:, :4].argmax(1), make(model)
    with Monitor(model, optimizer, every_n_steps=10) as monitor:
        for step in range(120):
            chosen = torch.arange(32 * step, 32 * step + 32) % 512
            loss = functional.cross_entropy(model(x[chosen]), labels[chosen])
            if knows_loss:
                monitor.log_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss < 0.8
    return monitor


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("knows_loss", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_healthy_run_is_told_nothing(
    optimizer: str,
    knows_loss: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.getLogger("adiv_monitor"), "propagate", False)  # no handlers
    running = perceptron(OPTIMIZERS[optimizer], knows_loss=knows_loss)._outlet.running
    findings = running.findings()
    assert not findings
    assert running_headline(findings, running.record()) == NOTHING
    line = "adiv-monitor: nothing found in what was measured (12 measured steps)"
    unknown = "" if knows_loss else f"; the loss is {LOSS_UNKNOWN}"
    assert capsys.readouterr().err == f"{line}{unknown}\n"


@pytest.mark.parametrize(("steps", "begins"), [(1, "can't tell"), (3, "nothing found")])
def test_the_line_at_the_end_needs_no_set_up_logging(
    steps: int, begins: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed() -> str:
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2), torch.randn(32, 3)
        trained(model, lambda model: model(x).square().mean(), steps)
        return capsys.readouterr().err

    assert printed() == ""  # pytest has set up logging
    monkeypatch.setattr(logging.getLogger("adiv_monitor"), "propagate", False)
    assert printed().startswith(f"adiv-monitor: {begins}")


def test_closing_lines_of_several_monitors_name_their_optimizers(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def train(*makers: type[torch.optim.Optimizer]) -> list[str]:
        caplog.clear()
        model, x = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), torch.randn(32, 3)
        parts = [make(part.parameters(), 0.01) for make, part in zip(makers, model, strict=False)]
        sinks = [TensorBoardSink(tmp_path / make.__name__) for make in makers]
        with caplog.at_level(logging.INFO, "adiv_monitor"), ExitStack() as stack:
            for part, sink in zip(parts, sinks, strict=True):
                stack.enter_context(Monitor(model, part, every_n_steps=1, sinks=[sink]))
            model(x).square().mean().backward()
            for part in parts:
                part.step()
        return [r.getMessage() for r in caplog.records if r.name == "adiv_monitor"]

    (alone,) = train(SGD)
    assert " of " not in alone.split("(")[0] and alone.endswith(f" → {tmp_path / 'SGD'}")
    last, first = train(SGD, Adam)
    assert first.startswith("adiv-monitor: SGD of Sequential: ")
    assert last.startswith("adiv-monitor: Adam of Sequential: ")
    assert last.endswith(f" → {tmp_path / 'Adam'}")


def measured(every: int, moves: Callable[[int], float], losses: Callable[[int], float]) -> Running:
    """The reports of 400 steps in which one layer moves less and less."""
    running = Running()
    for step in range(0, 400, every):
        layers = {"a": reading(update_ratio=moves(step)), "b": reading(), "c": reading()}
        running.add(StepReport(step, layers, {}, 1.0))
    running.add_losses({step: losses(step) for step in range(400)})
    return running


@pytest.mark.parametrize("every", [1, 10, 50, 100, 150])
def test_what_has_settled_does_not_depend_on_the_interval(every: int) -> None:
    falling = measured(every, lambda s: 0.03 * math.exp(-s / 20), lambda s: 2.3 * 0.99**s)
    assert not falling.findings()
    still = measured(every, lambda s: 0.03 * math.exp(-s / 20), lambda s: 2.3)
    assert {f.name for f in still.findings()} >= {"stands-still"}

"""The monitor reports alignments beside its own readings."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from cases import CASES, loss_of
from setups import mlp, one_step, trained
from torch import nn

from adiv_monitor import Monitor
from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.report import StepReport
from adiv_monitor.sinks import JsonlSink, TableSink


def test_records_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, batch = mlp()
    report = one_step(
        model, lambda m: loss_of(m, batch).backward(), alignment=Probe(batch[0], spectral=True)
    )
    record = json.loads(json.dumps(report.to_dict()))
    assert record["alignment"]["2"]["alpha"] == report.alignment["2"].alpha
    assert "omega" not in record["alignment"]["0"]
    assert StepReport.from_dict(record).alignment == report.alignment
    assert [*report.alignment] == ["0", "2", "4"]
    for sink in (JsonlSink(tmp_path / "a.jsonl"), TableSink()):
        sink.write(report)
        sink.close()
    assert "omega" in capsys.readouterr().out


def test_it_is_read_right_after_the_step_against_the_weights_at_attach() -> None:
    case = CASES["mlp"]
    model, x = case.model(), case.batches(1, 5)[0][0]
    by_hand = Alignment(model, Probe(x))
    read, batches = [], iter(case.batches(2))

    def after(step: int) -> None:
        read.append(by_hand.read())
        with torch.no_grad():  # changes after the step must not count
            next(model.parameters()).mul_(1.5)

    loss = lambda model: loss_of(model, next(batches))  # noqa: E731
    reports = trained(model, loss, 2, after=after, alignment=Probe(x))
    assert [dict(report.alignment) for report in reports] == read


class Breaks(nn.Linear):
    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken and not self.training:
            raise RuntimeError("in evaluation")
        return super().forward(x)


def test_what_fails_is_said_and_training_goes_on() -> None:
    model = nn.Sequential(Breaks(20, 20), nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = Monitor(model, optimizer, alignment=Probe(torch.ones(2, 20)))
        with monitor:
            Breaks.broken = True
            model(torch.ones(3, 20)).sum().backward()
            optimizer.step()
    Breaks.broken = False
    assert monitor.latest.alignment == {}
    assert "in evaluation" in monitor.latest.notes[0]
    assert monitor.latest.layers.keys() == {"0", "1"}
    assert len(caught) == 1
    assert model.training


def test_a_resumed_run_is_compared_with_the_first_weights() -> None:
    case = CASES["mlp"]
    model, (x, _) = case.model(), case.batches(1, 5)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(saved: dict[str, object] | None) -> tuple[dict[str, object], float]:
        monitor = Monitor(model, optimizer, every_n_steps=1, alignment=Probe(x), on_error="raise")
        if saved is not None:
            monitor.load_state_dict(saved)
        with monitor:
            loss_of(model, case.batches(1)[0]).backward()
            optimizer.step()
        return monitor.state_dict(), monitor.latest.alignment["2"].output_change_rms

    saved, first = step(None)
    _, resumed = step(saved)
    _, afresh = step(None)
    assert resumed > 1.5 * first
    assert afresh < resumed

"""The monitor reports alignments beside its own readings, without any effect on the run."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from cases import CASES, OPTIMIZERS, loss_of
from torch import nn

from adiv_monitor import AlignmentReading, Monitor
from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.report import StepReport
from adiv_monitor.sinks import JsonlSink, TableSink


def train(name: str, probe: bool, steps: int = 6) -> tuple[Monitor | None, dict[str, torch.Tensor]]:
    case = CASES[name]
    model = case.model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    monitor = None
    if probe:
        given = Probe(case.batches(1, 5)[0][0], spectral=True)
        monitor = Monitor(model, optimizer, every_n_steps=2, alignment=given, on_error="raise")
        monitor.attach()
    torch.manual_seed(3)
    for batch in case.batches(steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    if monitor is not None:
        monitor.close()
    return monitor, {**model.state_dict(), "random": torch.get_rng_state()}


def test_records_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor, _ = train("mlp", True)
    report = monitor.latest
    record = json.loads(json.dumps(report.to_dict()))
    assert record["alignment"]["2"]["alpha"] == report.alignment["2"].alpha
    assert "omega" not in record["alignment"]["0"]
    assert StepReport.from_dict(record).alignment == report.alignment
    assert [row["layer"] for row in report.alignment_rows()] == ["0", "2", "4"]
    for sink in (JsonlSink(tmp_path / "a.jsonl"), TableSink()):
        sink.write(report)
        sink.close()
    assert "omega" in capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_the_run_is_the_same_to_the_last_bit(name: str) -> None:
    (_, plain), (monitor, measured) = train(name, False), train(name, True)
    assert all(torch.equal(plain[key], measured[key]) for key in plain)
    assert [report.step for report in monitor.reports] == [0, 2, 4]
    for report in monitor.reports:
        assert report.alignment
        assert all(isinstance(r, AlignmentReading) for r in report.alignment.values())


def test_it_is_read_right_after_the_step_against_the_weights_at_attach() -> None:
    case = CASES["mlp"]
    model, x = case.model(), case.batches(1, 5)[0][0]
    by_hand = Alignment(model, Probe(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read = []
    with Monitor(model, optimizer, every_n_steps=1, alignment=Probe(x)) as monitor:
        for batch in case.batches(2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            read.append(by_hand.read())
            with torch.no_grad():  # changes after the step must not count
                next(model.parameters()).mul_(1.5)
    assert [dict(report.alignment) for report in monitor.reports] == read


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
    with pytest.raises(TypeError, match="expected an adiv_monitor"):
        Monitor(model, optimizer, alignment=torch.ones(2, 20))


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

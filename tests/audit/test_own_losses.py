"""Losses of the user's own run: read, and held against those of the copy."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import cross_entropy, unasked
from computes import Computes
from made_records import record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trial_setups import batches, mlp

from adiv_monitor import audit
from adiv_monitor.audit.command.prepare import own_losses
from adiv_monitor.audit.experiments.measure import averages
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.course import difference
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages.report_page import headline

STEPS = 24


def sgd(model: nn.Module, rate: float = 0.3) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def audited(model: nn.Module | None = None, data: Any = None, **given: Any) -> AuditReport:
    given = {"optimizer": sgd, "steps": 3, "try_fixes": False, **given}
    with unasked():
        return audit(model or mlp(), data or batches(), loss=cross_entropy, **given)


@cache
def losses(rate: float) -> tuple[float, ...]:
    """Of a loop by hand; a hook that is lost divides the rate, say."""
    model = mlp()
    return loop(model, sgd(model, rate), [batches()[step % 8] for step in range(STEPS)])


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> tuple[float, ...]:
    found = []
    for batch in data:
        loss = cross_entropy(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return tuple(found)


def test_a_copy_that_trains_as_the_run_did_says_so_in_a_note() -> None:
    report = audited(own_losses=losses(0.3), steps=STEPS)
    assert report.record.losses == losses(0.3)
    assert "does not train as your run did" not in report.verdict
    agrees = f"The copy's losses agree with those of your run over {STEPS} steps."
    assert agrees in report.record.notes
    assert AuditReport.from_json(report.to_json()) == report


def test_a_copy_that_trains_otherwise_says_so_first() -> None:
    report = audited(own_losses=losses(1e-4), steps=STEPS)
    assert report.verdict.startswith("The copy does not train as your run did: over the steps 0 to")
    found = difference(report.record)
    assert found.startswith("over the steps ")
    assert headline((), report.record) == "The copy does not train as your run did"
    said = headline((Finding("not-held", "act"),), report.record)
    assert said == "One thing to fix, and the copy does not train as your run did"
    without = replace(report.record, own_losses={})
    assert difference(without) == "" and headline((), without) == "Nothing to fix"


def against(own: list[float]) -> Record:
    return record(losses=losses(0.3), own_losses=dict(enumerate(own)))


def test_a_difference_of_the_last_half_is_found_and_noise_is_not() -> None:
    copied = list(losses(0.3))
    assert difference(against(copied)) == ""
    found = difference(against(copied[:12] + [x + 1.0 for x in copied[12:]]))
    assert found.startswith("over the steps 12 to 23,")
    noisy = [x + (-1) ** step for step, x in enumerate(copied)]
    assert difference(against(noisy)) == ""
    assert difference(against([1.0, *[math.nan] * 23]))


def test_too_few_losses_are_not_compared() -> None:
    report = audited(own_losses={0: 9.0, 1: 9.0, 2: 9.0, 1000: 9.0})
    assert "does not train" not in report.verdict
    few = "Only 3 of your run's losses belong to steps that the copy took"
    assert any(few in note for note in report.record.notes)


def loader(**given: Any) -> DataLoader[Any]:
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    return DataLoader(TensorDataset(x, y), 32, shuffle=True, **given)


def test_the_order_that_a_loaders_generator_draws_is_the_runs_own() -> None:
    data, model = loader(generator=torch.Generator().manual_seed(5)), mlp()
    report = audited(data=data)
    own = loop(model, sgd(model), data)
    assert report.record.losses == own[:3]
    assert report.record.facts.data == "DataLoader of TensorDataset"


def taught() -> nn.Module:
    """Return a student, and a teacher that begins as it is."""
    teacher = mlp().requires_grad_(False)
    return Computes(lambda m, x: m.student(x), student=mlp(), teacher=teacher)


def test_networks_that_a_loop_averages_into_are_said_to_stay() -> None:
    assert averages(taught()) == ["teacher"]
    frozen = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    norms = nn.Sequential(nn.LayerNorm(8).requires_grad_(False), nn.LayerNorm(8))
    assert averages(frozen) == averages(norms) == averages(mlp()) == []
    stays = "if your loop updates 'teacher', as an average or a target, the copy does not"
    assert stays in audited(taught()).verdict


HISTORY = [{"step": 2, "loss": 2.0}, {"step": 4, "loss": 1.0}, {"step": 4, "eval_loss": 7.0}]
FILES = {
    "[2.5, 1.5]": {0: 2.5, 1: 1.5},
    json.dumps({"log_history": HISTORY}): {0: 2.0, 1: 2.0, 2: 1.0, 3: 1.0},
    "epoch,step,train_loss_step,val_loss\n0,0,2.5,\n0,,,9\n0,2,1.5,\n": {0: 2.5, 2: 1.5},
    "train/my_loss,step\n3,0\n": {0: 3.0},
}


@pytest.mark.parametrize("text", FILES)
def test_losses_are_read_from_what_trainers_log(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    assert own_losses(str(tmp_path / "file")) == FILES[text]

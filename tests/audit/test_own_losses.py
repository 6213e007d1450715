"""Losses of the user's own run: read, and held against those of the copy."""

import copy
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import cross_entropy
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from trial_setups import batches, mlp

from adiv_monitor import audit
from adiv_monitor.audit.experiments.averages import averages
from adiv_monitor.audit.options.usage import UsageError
from adiv_monitor.audit.sources.own_losses import own_losses
from adiv_monitor.diagnosis import own_run
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages.report_page import headline

STEPS = 24


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def audited(**given: Any) -> Any:
    quick = {"steps": STEPS, "try_fixes": False}
    given = {"optimizer": sgd, **quick, **given}
    return audit(mlp(), batches(), loss=cross_entropy, **given)


def losses(rate: float) -> list[float]:
    """Of a loop by hand; a hook that is lost divides the rate, say."""
    model, found = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(STEPS):
        loss = cross_entropy(model, batches()[step % 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_a_copy_that_trains_as_the_run_did_says_so_in_a_note() -> None:
    report = audited(own_losses=losses(0.3))
    assert "does not train as your run did" not in report.verdict
    assert (
        f"The copy's losses agree with those of your run over {STEPS} steps." in report.record.notes
    )
    assert type(report).from_json(report.to_json()) == report


def loader(**given: Any) -> DataLoader[Any]:
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    return DataLoader(TensorDataset(x, y), 32, shuffle=True, **given)


def test_the_order_that_a_loaders_generator_draws_is_the_runs_own() -> None:
    batches_of = loader(generator=torch.Generator().manual_seed(5))
    quick = {"steps": 8, "optimizer": sgd, "try_fixes": False}
    report = audit(mlp(), batches_of, loss=cross_entropy, **quick)  # type: ignore[arg-type]
    model, own = mlp(), []
    optimizer = sgd(model)
    for batch in batches_of:
        loss = cross_entropy(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        own.append(float(loss.detach()))
    assert report.record.losses == tuple(own)
    assert report.record.facts.data == "DataLoader of TensorDataset"
    assert not any("another order of batches" in note for note in report.record.notes)


def test_an_order_that_is_drawn_anew_is_noted_and_said_beside_own_losses() -> None:
    quick = {"steps": 8, "try_fixes": False}
    report = audit(mlp(), loader(), loss=cross_entropy, **quick)  # type: ignore[arg-type]
    assert any("another order of batches" in note for note in report.record.notes)
    assert "another order of batches" not in report.verdict
    losses_of = [1.0] * 8
    said = audit(mlp(), loader(), loss=cross_entropy, own_losses=losses_of, **quick)  # type: ignore[arg-type]
    assert "the loader draws another order of batches" in said.verdict


class Taught(nn.Module):
    """A student, and a teacher that begins as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def test_networks_that_a_loop_averages_into_are_said_to_stay() -> None:
    model = mlp()
    average = AveragedModel(model).module

    def consistent(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - average(batch[0])).square().mean()

    assert averages(model, consistent) == averages(model, partial(consistent)) == ["average"]
    assert averages(Taught(), cross_entropy) == ["teacher"]
    frozen = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    assert averages(frozen, cross_entropy) == averages(model, cross_entropy) == []
    quick = {"steps": 8, "try_fixes": False, "optimizer": sgd}
    report = audit(Taught(), batches(), loss=cross_entropy, **quick)  # type: ignore[arg-type]
    assert (
        "if your loop updates 'teacher', as an average or a target, the copy does not"
        in report.verdict
    )


def test_a_copy_that_trains_otherwise_says_so_first_in_the_verdict() -> None:
    report = audited(own_losses=losses(1e-4))
    assert report.verdict.startswith("The copy does not train as your run did: over the steps 0 to")
    found = own_run.difference(report.record)
    assert found is not None and found.own > found.copy
    diverged = replace(report.record, own_losses=dict(enumerate([1.0, *[math.nan] * 23])))
    assert own_run.difference(diverged) is not None
    assert own_run.said(replace(report.record, own_losses={})) == ""


def test_a_headline_does_not_say_nothing_to_fix_of_a_run_that_trains_otherwise() -> None:
    report = audited(own_losses=losses(1e-4))
    assert headline((), report.record) == "The copy does not train as your run did"
    assert headline((), replace(report.record, own_losses={})) == "Nothing to fix"
    act = Finding("not-held", "act")
    said = headline((act,), report.record)
    assert said == "One thing to fix, and the copy does not train as your run did"


def test_too_few_losses_are_not_compared() -> None:
    report = audited(own_losses={0: 9.0, 10: 9.0, 20: 9.0, 1000: 9.0})
    assert "does not train" not in report.verdict
    assert any(
        "Only 3 of your run's losses belong to steps that the copy took" in n
        for n in report.record.notes
    )


def test_what_the_copy_lacks_is_in_the_verdict() -> None:
    model = mlp()
    optimizer = sgd(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    quick: dict[str, Any] = {"steps": 3, "try_fixes": False}
    report = audit(model.eval(), batches(), loss=cross_entropy, optimizer=optimizer, **quick)
    assert report.verdict.endswith(
        "The copy differs from your run: the model was given in evaluation mode and is trained in "
        "training mode; no scheduler runs."
    )
    assert "differs from your run" not in audited().verdict


def test_a_difference_of_the_last_half_is_found_and_noise_is_not() -> None:
    record = audited().record

    def against(own: list[float]) -> Record:
        return replace(record, own_losses=dict(enumerate(own)))

    copy = list(record.losses)
    assert own_run.difference(against(copy)) is None
    later = copy[:12] + [x + 1.0 for x in copy[12:]]
    found = own_run.difference(against(later))
    assert found is not None and (found.first, found.last) == (12, 23)
    noisy = [x + (-1) ** step for step, x in enumerate(copy)]
    assert own_run.difference(against(noisy)) is None


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


BAD = {
    "[]": "holds no loss",
    '["a"]': "expected a number",
    "[null]": "expected a number",
    '{"a": 1}': "log_history",
    "{": "Expecting",
    "a,b\n1,2\n": "no column of losses among a, b",
    "": "no column",
}


@pytest.mark.parametrize("text", BAD)
def test_what_holds_no_losses_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(UsageError, match=BAD[text]):
        own_losses(str(tmp_path / "file"))
    with pytest.raises(UsageError, match="can't be read"):
        own_losses(str(tmp_path / "none"))

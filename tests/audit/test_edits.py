"""Edits of single calls, and the search for the line that keeps a loss high."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import audit
from adiv_monitor.audit.experiments.calls import Call
from adiv_monitor.audit.trials.edits import edits_of
from adiv_monitor.diagnosis.finding import Finding

CHANCE = torch.Generator().manual_seed(0)
X, Y = torch.randn(2, 3, 3, generator=CHANCE)
PLACES = torch.tensor([[0, 2, 1]])


def called(function: Callable[..., Any], *args: Any, path: str | None = "m", **kwargs: Any) -> Call:
    """Return a call, as a pass records it."""
    return Call(0, function.__name__, path, args, kwargs, function(*args, **kwargs), function)


EDITS: dict[str, tuple[Call, Tensor]] = {
    "with dim=0": (called(torch.softmax, X, dim=1), X.softmax(0)),
    "with dim=1": (called(torch.gather, X, 0, PLACES), X.gather(1, PLACES)),
    "after a transpose of axes 0 and 1": (called(Tensor.view, X, 9), X.T.reshape(9)),
    "with its operands exchanged": (called(torch.sub, X, Y), Y - X),
    "by the inverse number": (called(torch.mul, X, 0.25), 4 * X),
    "at the other end": (called(Tensor.__getitem__, X, (slice(None), -1)), X[:, 0]),
    "left out": (called(torch.exp, X), X),
}


@pytest.mark.parametrize("words", EDITS)
def test_an_edit_computes_what_its_words_say(words: str) -> None:
    call, expected = EDITS[words]
    [edit] = [edit for edit in edits_of(call) if edit.words == words]
    torch.testing.assert_close(edit.result(call), expected)


KEPT = {
    "an activation": called(torch.relu, X),
    "random numbers": called(torch.randn_like, X),
    "a function of the loss": called(torch.exp, X, path=None),
    "a difference in the loss": called(torch.sub, X, Y, path=None),
    "a mask": called(Tensor.masked_fill, X, X > 0, 7.0),
    "a power": called(torch.pow, X, 2, path=None),
    "a constant that is added": called(torch.add, X.clone().requires_grad_(), Y),
    "no place at an end": called(Tensor.__getitem__, X, 1),
    "an index of tensors": called(Tensor.__getitem__, X, PLACES),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_may_be_meant_has_no_edit(what: str) -> None:
    assert not [*edits_of(KEPT[what])]


class Reader(nn.Module):
    """Reads six numbers in order, and answers from one state; its task is in the first number."""

    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place = place
        self.each, self.head = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.each(x)[:, self.place]))


def lines_at_fault(place: int) -> list[Finding]:
    """Audit a reader of one place; return the findings on one line."""
    x = torch.randn(60, 16, 6, 4, generator=torch.Generator().manual_seed(1))
    batches = [(of, of[:, 0, :3]) for of in x]
    report = audit(
        Reader(place),
        batches,
        loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.02),
        steps=60,
    )
    return [finding for finding in report.findings if finding.name == "one-edit"]


def test_the_line_at_fault_is_named_with_the_change() -> None:
    [finding] = lines_at_fault(-1)
    assert finding.strength == "act"
    assert "__getitem__ (test_edits.py:" in finding.summary
    assert finding.summary.endswith("at the other end.")


@pytest.mark.slow
def test_a_healthy_program_has_no_line_at_fault() -> None:
    assert not lines_at_fault(0)

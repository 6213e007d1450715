"""Targets in another order than their inputs, drawn anew, or unread, beside near relatives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_records import record
from torch import Tensor, nn
from torch.nn import functional
from trial_setups import answer, batches, setup

from adiv_monitor.audit.experiments.questions import ASKS, Untold, asked
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.record import Fact, Probed

Of = Callable[[nn.Module, Any], Tensor]


def facts(name: str, of: Setup) -> tuple[Fact, ...]:
    return answer(name, of, of.fork()).facts


def said(name: str, *found: Fact) -> list[str]:
    made = record(probed={name: Probed(found)})
    return [finding.summary for finding in diagnose(made) if finding.name == name]


# In another order


class Tags(nn.Module):
    """A class for each place, which a recurrent network sees up to there, or from both ends."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(4, 12, batch_first=True, bidirectional=both)
        self.head = nn.Linear(24 if both else 12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0])


def of_places(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def tags(move: Callable[[Tensor], Tensor], both: bool = False) -> Setup:
    x = torch.randn(4, 40, 12, 4, generator=torch.Generator().manual_seed(0))
    made = tuple((part, move((part[..., 0] > 0).long())) for part in x)
    return setup(model=Tags(both), batches=made, loss=of_places)


@pytest.mark.parametrize(
    ("move", "both", "name", "order"),
    [
        (lambda y: y.flip(1), False, "reversed along axis 1", "wrong"),
        (lambda y: y.flip(1), True, "reversed along axis 1", "meant"),
        (lambda y: y.roll(-2, 1), False, "shifted by 2 along axis 1", "meant"),
        (lambda y: y.roll(1, 0), False, "shifted by -1 along the samples", "unclear"),
        (lambda y: y.t().reshape(y.shape), False, "axes 0 and 1 transposed", "wrong"),
    ],
)
def test_targets_in_another_order_are_found(
    move: Callable[[Tensor], Tensor], both: bool, name: str, order: str
) -> None:
    (fact,) = facts("targets-moved", tags(move, both))
    assert fact.words == {"move": name, "order": order}
    assert fact.numbers["own"] < 0.1 and fact.numbers["best"] > 0.4
    assert f"{name}, they fit better" in said("targets-moved", fact)[0]


def test_targets_of_the_batch_before_are_found() -> None:
    made = batches(6)
    late = tuple((x, made[i - 1][1]) for i, (x, _) in enumerate(made))
    (fact,) = facts("targets-moved", setup(batches=late))
    assert fact.words["move"] == "taken from the batch behind"
    assert not said("targets-moved", *facts("targets-moved", setup(batches=made)))


def test_targets_at_their_places_are_left_alone_and_so_are_the_next_values() -> None:
    assert not said("targets-moved", *facts("targets-moved", tags(lambda y: y)))
    x = torch.randn(4, 24, 8, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 4)
    ahead = setup(
        model=model,
        batches=tuple((part[:, :-1], part[:, 1:]) for part in x),
        loss=lambda m, b: functional.mse_loss(m(b[0]), b[1]),
    )
    assert not facts("targets-moved", ahead)


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (lambda y: y.mT, "axes 1 and 2 transposed"),
        (lambda y: y.rot90(1, (1, 2)), "axes 1 and 2 turned by 270°"),
        (lambda y: y, ""),
        (lambda y: y[torch.randperm(48)], ""),  # of other images: no move fits
    ],
)
def test_targets_of_pixels_that_are_transposed_or_turned_are_found(move: Any, name: str) -> None:
    torch.manual_seed(0)
    y = (torch.rand(2, 48, 5, 5) > 0.7).float()
    made = tuple((part[:, None] + 0.3 * torch.randn(48, 1, 5, 5), move(part)) for part in y)
    of = setup(
        model=nn.Conv2d(1, 1, 3, padding=1),
        batches=made,
        loss=lambda m, b: functional.mse_loss(m(b[0])[:, 0], b[1]),
    )
    found = facts("targets-moved", of)
    assert [fact.words["move"] for fact in found] == [name] * bool(name)


# Drawn anew


def noised(again: bool, noise: float = 1.0) -> Of:
    def of(model: nn.Module, batch: Any) -> Tensor:
        drawn = noise * torch.randn_like(batch[0][:, :3])
        other = noise * torch.randn_like(drawn) if again else drawn
        x = batch[0] + functional.pad(drawn, (0, 9))
        return functional.mse_loss(model(x), batch[0][:, :3] + other)

    return of


@pytest.mark.parametrize(("again", "noise", "hits"), [(True, 2, 1), (False, 2, 0), (True, 0.3, 0)])
def test_targets_that_are_drawn_apart_from_the_inputs(again: bool, noise: float, hits: int) -> None:
    found = facts("labels-unrelated", setup(loss=noised(again, noise)))
    assert len(said("labels-unrelated", *found)) == hits
    assert all(fact.place.startswith("randn_like") for fact in found)


@pytest.mark.parametrize(("level", "hits"), [(0.1, 1), (0.7, 0)])
def test_noise_that_the_inputs_hardly_hold(level: float, hits: int) -> None:
    def of(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] / batch[0].std()
        e = torch.randn_like(x)
        return functional.mse_loss(model((1 - level**2) ** 0.5 * x + level * e), e[:, :3])

    found = facts("labels-unrelated", setup(loss=of))
    assert [fact.numbers["held"] for fact in found] == [pytest.approx(level**2, rel=0.15)]
    assert len(said("labels-unrelated", *found)) == hits


def test_places_that_are_hidden_at_random_are_no_noise() -> None:
    def of(model: nn.Module, batch: Any) -> Tensor:
        hidden = torch.rand(batch[0].shape) < 0.05
        return ((model(batch[0] * ~hidden) - batch[0][:, :3]) * hidden[:, :3]).square().mean()

    assert not facts("labels-unrelated", setup(loss=of))


# Unread


def gathered(axis: int) -> Of:
    def of(model: nn.Module, batch: Any) -> Tensor:
        picked = model(batch[0]).gather(axis, batch[1][:, None])[:, 0]
        return (picked - batch[0][:, 0]).square().mean()

    return of


def test_outputs_that_the_loss_does_not_read() -> None:
    """Gathered along the samples, labels take the first column of the first three."""
    found = facts("class-untaught", setup(loss=gathered(0)))
    unread = {f.words["of"]: f.numbers["unread"] for f in found}
    assert unread == {"samples of a batch": 29, "columns": 2}
    assert "Of the 3 columns" in said("class-untaught", *found[1:])[0]
    assert not facts("class-untaught", setup(loss=gathered(1)))


@pytest.mark.parametrize("cut", [True, False])
def test_a_ratio_of_a_result_and_itself_teaches_nothing(cut: bool) -> None:
    def of(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0]).log_softmax(1).gather(1, batch[1][:, None])
        before = logits.detach() if cut else logits
        return -(logits - before).exp().mean()

    assert bool(facts("zero-gradient", setup(loss=of))) is not cut


@pytest.mark.parametrize("across", [True, False])
def test_places_are_no_classes(across: bool) -> None:
    """Of four places and four classes, which a cross-entropy expects along axis 1."""

    def of(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        return functional.cross_entropy(logits if across else logits.mT, batch[1])

    made = ((torch.randn(8, 4, 5), torch.randint(4, (8, 4))),)
    found = facts("softmax-over-samples", setup(model=nn.Linear(5, 4), batches=made, loss=of))
    assert ["runs over the places" in x for x in said("softmax-over-samples", *found)] == [
        True
    ] * across


def test_what_was_found_before_a_question_failed_is_kept(monkeypatch: Any) -> None:
    def half(*_: Any) -> Any:
        yield Fact("here")
        raise Untold("no more")

    monkeypatch.setitem(ASKS, "half", half)
    of = setup()
    assert asked(of, of.fork(), ["half"])["half"] == Probed((Fact("here"),), "no more")

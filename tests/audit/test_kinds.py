"""Questions about losses and data: what each finds, and what comes near to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from audited import batches, seen
from torch import Tensor, nn
from torch.nn import functional
from trial_setups import answer, loss, setup

from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Probed, Record

GENERATOR = torch.Generator().manual_seed(0)


def found(name: str, of: Any) -> list[Finding]:
    """Return the findings that the facts of one question show."""
    answered = answer(name, of, of.fork())
    assert not answered.untold
    facts: Record = seen(nn.Linear(6, 3), steps=2)
    record = Record(facts.facts, (), (), (), probed={name: Probed(answered.facts)})
    assert name in FAULTS
    return [finding for finding in diagnose(record) if finding.name == name]


class Coded(nn.Module):
    """An autoencoder with a code of mean and spread."""

    def __init__(self, draw: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.draw = nn.Linear(12, 4), nn.Linear(2, 12), draw

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(self.draw(mean, spread.exp())), mean


def coded(model: nn.Module, batch: Any) -> Tensor:
    made, mean = model(batch[0])
    return functional.mse_loss(made, batch[0]) + 0.01 * mean.square().mean()


@pytest.mark.parametrize(
    ("draw", "hits"),
    [
        (torch.normal, True),
        (lambda m, s: torch.distributions.Normal(m, s).sample(), True),
        (lambda m, s: torch.distributions.Normal(m, s).rsample(), False),
        (lambda m, s: m + s * torch.normal(torch.zeros_like(m)), False),
    ],
)
def test_a_sample_without_a_path_cuts_the_gradient(draw: Any, hits: bool) -> None:
    said = found("gradient-cut", setup(model=Coded(draw), loss=coded))
    assert bool(said) is hits
    assert not hits or "rsample" in said[0].advice[0].text


@pytest.mark.parametrize(("momentum", "hits"), [(0.001, True), (0.01, False), (0.999, True)])
def test_statistics_that_hardly_follow(momentum: float, hits: bool) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 3))
    assert bool(found("running-statistics", setup(model=model))) is hits


class Words(nn.Module):
    def __init__(self, padding: int | None, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.read, self.head = nn.Embedding(9, 12, padding), read, nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.read(self.table(tokens), tokens))


def mean_of_all(x: Tensor, tokens: Tensor) -> Tensor:
    return x.mean(1)


def mean_of_words(x: Tensor, tokens: Tensor) -> Tensor:
    real = (tokens != 0).unsqueeze(2)
    return (x * real).sum(1) / real.sum(1)


def texts(padded: bool) -> tuple[tuple[Tensor, Tensor], ...]:
    tokens = torch.randint(0, 9, (16, 10), generator=GENERATOR)
    if padded:
        tokens = tokens.clamp(min=1)
        for row, length in enumerate(torch.randint(3, 8, (16,), generator=GENERATOR).tolist()):
            tokens[row, length:] = 0
    return ((tokens, torch.randint(0, 3, (16,), generator=GENERATOR)),)


@pytest.mark.parametrize(
    ("padding", "padded", "hits"), [(0, False, True), (0, True, False), (None, False, False)]
)
def test_a_word_at_the_index_of_padding(padding: int | None, padded: bool, hits: bool) -> None:
    of = setup(model=Words(padding, mean_of_words), batches=texts(padded))
    assert bool(found("padding-is-word", of)) is hits


@pytest.mark.parametrize(("read", "hits"), [(mean_of_all, True), (mean_of_words, False)])
def test_padding_that_is_read(read: Any, hits: bool) -> None:
    of = setup(model=Words(None, read), batches=texts(padded=True))
    assert bool(found("padding-read", of)) is hits


class Weighed(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.score, self.head, self.axis = nn.Linear(4, 1), nn.Linear(4, 3), axis

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 3, 4)
        return self.head((self.score(x).softmax(self.axis) * x).sum(1))


@pytest.mark.parametrize(("axis", "hits"), [(-1, True), (1, False)])
def test_weights_of_a_single_score(axis: int, hits: bool) -> None:
    assert bool(found("softmax-of-one", setup(model=Weighed(axis)))) is hits


def two_tasks(scale: float) -> Callable[[nn.Module, Any], Tensor]:
    def both(model: nn.Module, batch: Any) -> Tensor:
        made = model(batch[0])
        places = scale * batch[0][:, :1]
        return functional.cross_entropy(made, batch[1]) + (made[:, :1] - places).square().mean()

    return both


@pytest.mark.parametrize(("scale", "hits"), [(300.0, True), (1.0, False)])
def test_a_term_that_another_outweighs(scale: float, hits: bool) -> None:
    assert bool(found("term-outweighed", setup(loss=two_tasks(scale)))) is hits


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(12, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(("bound", "hits"), [(0.0, True), (1.0, False)])
def test_a_loss_that_falls_by_its_own_weight(bound: float, hits: bool) -> None:
    def weighed(model: Any, batch: Any) -> Tensor:
        return (-model.weight).exp() * loss(model, batch) + bound * model.weight

    of = setup(model=Balanced(), loss=weighed)
    trained = of.fork()
    with torch.no_grad():
        trained.model.weight += 0.0 if bound else 3.0  # type: ignore[operator, union-attr]
        if bound:
            trained.model.layer.weight *= 0.1  # type: ignore[union-attr]
            trained.model.layer.bias *= 0.1  # type: ignore[union-attr]
    facts = answer("loss-own-fall", of, trained).facts
    assert (facts[0].numbers["share"] < 0.1) is hits


@pytest.mark.parametrize(
    ("share", "of_others", "hits"), [(0.5, 0, True), (0.0, 0, False), (0.5, 1, False)]
)
def test_targets_of_which_a_share_is_flipped(share: float, of_others: int, hits: bool) -> None:
    x = functional.interpolate(torch.randn(64, 1, 4, 4, generator=GENERATOR), (16, 16))
    y = (x[:, 0] > 0).float()
    flipped = torch.rand(64, generator=GENERATOR) < share
    x = x + 0.1 * torch.randn(x.shape, generator=GENERATOR)
    x[flipped] = x[flipped].flip(3)
    y = y.roll(of_others, 0)
    of = setup(
        model=nn.Conv2d(1, 1, 3, padding=1),
        batches=((x, y),),
        loss=lambda m, b: (m(b[0])[:, 0] - b[1]).square().mean(),
    )
    assert any("flipped" in f.summary for f in found("targets-moved", of)) is hits


def test_the_function_whose_gradient_is_not_a_number_is_named_with_its_line() -> None:
    def rooted(model: nn.Module, batch: Any) -> Tensor:
        return (0 * model(batch[0])).sqrt().mul(0).sum()

    record = seen(nn.Linear(6, 3), batches(), loss=rooted, steps=2)
    assert (record.first_non_finite or "").startswith("gradient of sqrt (test_kinds.py:")

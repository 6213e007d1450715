"""Small setups to audit: models, batches of a learnable task, and records of their runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import made_records
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.audit.experiments.questions import asked
from adiv_monitor.audit.training.setup import Fork, Loss, Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.record import Fact, Probed, Record


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of a batch."""
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def mlp() -> nn.Module:
    """Return a perceptron with one hidden layer and ReLU."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def cnn() -> nn.Module:
    """Return a network with a plain and a grouped convolution."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


def batches(count: int = 8, samples: int = 32, scale: float = 1.0) -> tuple[Any, ...]:
    """Return batches of three classes, whose 12 features have a mean per class."""
    generator = torch.Generator().manual_seed(2)
    means = torch.randn(3, 12, generator=generator)
    found = []
    for _ in range(count):
        y = torch.randint(3, (samples,), generator=generator)
        noise = torch.randn(samples, 12, generator=generator)
        found.append((scale * (means[y] + noise), y))
    return tuple(found)


def images(count: int = 4, samples: int = 8) -> tuple[Any, ...]:
    """Return batches of noise in four channels, each with its own mean and scale."""
    generator = torch.Generator().manual_seed(2)
    channel = torch.arange(1.0, 5)[:, None, None]
    return tuple(
        (
            channel + channel * torch.randn(samples, 4, 6, 6, generator=generator),
            torch.randint(3, (samples,), generator=generator),
        )
        for _ in range(count)
    )


def sgd(**settings: Any) -> Callable[[nn.Module], Optimizer]:
    """Return a function that makes SGD for a model."""
    settings = {"lr": 0.1, **settings}
    return lambda model: torch.optim.SGD(model.parameters(), **settings)


def setup(**changes: Any) -> Setup:
    """Return the setup of a healthy MLP training of 24 steps; keywords override its fields."""
    return replace(Setup(mlp(), sgd(), loss, batches(), steps=24), **changes)


def ran(of: Setup, **known: Any) -> Record:
    """Return a record with the losses of a setup's run, and else of a healthy one."""
    seen = made_records.record(
        facts=replace(made_records.FACTS, seconds_per_step=math.nan),
        losses=tuple(train(of.fork()).losses),
        chance=math.log(3),
    )
    return replace(seen, **known)


def answer(name: str, of: Setup, trained: Fork) -> Probed:
    """Return the answer to one question about copies."""
    return asked(of, trained, [name])[name]


def told(name: str, of: Setup, trained: bool = False) -> Probed:
    """Return the answer to one question about a copy, which was trained or not."""
    fork = of.fork()
    if trained:
        train(fork)
    return answer(name, of, fork)


def said(name: str, *facts: Fact, **values: Any) -> list[str]:
    """Return strength and sentence of the findings of these facts in an else healthy run."""
    found = diagnose(made_records.record(probed={name: Probed(facts)}, **values))
    return [f"{each.strength}: {each.summary}" for each in found if each.name == name]


# Question, what is asked about, its setup, and a part of the sentence.
Row = tuple[str, str, Callable[[], Setup], str]


def each_of(table: Sequence[Row]) -> pytest.MarkDecorator:
    """Parametrize a test by question, setup and part of the sentence.

    Of each question, all but the first row with a finding and the first without are slow.
    """
    rows, seen = [], set[tuple[str, bool]]()
    for q, what, make, part in table:
        marks = [pytest.mark.slow] * ((q, part == "") in seen)
        seen.add((q, part == ""))
        rows.append(pytest.param(q, make, part, id=f"{q}, {what}", marks=marks))
    return pytest.mark.parametrize(("question", "make", "part"), rows)


def assert_said(name: str, of: Setup, part: str, trained: bool = False) -> None:
    """Assert what a question says of a run whose loss stands still, or why nothing; "": nothing."""
    answered = told(name, of, trained)
    sentences = said(name, *answered.facts, losses=made_records.STILL)
    sentences = sentences or [f"untold: {answered.untold}"] * bool(answered.untold)
    assert [part in each for each in sentences] == [True] * bool(part), sentences


def of_outputs(compare: Callable[[Any, Tensor], Tensor]) -> Loss:
    """Return the loss of model and batch that compares outputs with targets."""
    return lambda model, batch: compare(model(batch[0]), batch[1])

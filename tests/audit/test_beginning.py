"""The start of training: gains, identical units, the loss of a constant prediction."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from adiv_monitor.audit.experiments.measure import chance
from adiv_monitor.audit.experiments.state import are_trained, weights
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.trials.fixes import FIXES


def net(*behind: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 5), *behind)


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def setup(model: nn.Module, loss: object = cross_entropy) -> Setup:
    batch = torch.randn(8, 300), torch.arange(8) % 5
    return Setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, (batch,), 1)  # type: ignore[arg-type]


def test_gains_are_those_that_initialisations_promise() -> None:
    model = net()
    assert weights(setup(model))["0"].gain == pytest.approx(3**-0.5, rel=0.02)
    nn.init.kaiming_normal_(model[0].weight)  # type: ignore[index, arg-type]
    assert weights(setup(model))["0"].gain == pytest.approx(2**0.5, rel=0.02)
    assert weights(setup(model))["0"].alike == 0
    nn.init.constant_(model[0].weight, 0.1)  # type: ignore[index, arg-type]
    nn.init.constant_(model[0].bias, -3.0)  # type: ignore[index, arg-type]
    constant = weights(setup(model))["0"]
    assert constant.gain == pytest.approx(0.1 * math.sqrt(300))
    assert (constant.alike, constant.bias) == (1, 3)


def test_layers_in_front_of_a_normalisation_are_told() -> None:
    model = net()
    model.insert(1, nn.BatchNorm1d(200))  # type: ignore[operator]
    found = weights(setup(model))
    assert [path for path, weight in found.items() if weight.normalised] == ["0"]


class Bare(nn.Module):
    """Multiplies by parameters that no layer holds; the first is drawn without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Parameter(torch.randn(300, 200)), nn.Linear(200, 5)
        self.latents = nn.Parameter(torch.randn(200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x @ self.first + self.latents).relu())


def test_parameters_that_no_layer_holds_have_gains() -> None:
    torch.manual_seed(0)
    of = setup(Bare())
    found = weights(of)
    assert list(found) == ["head", "first"] and found["first"].bare
    assert found["first"].gain == pytest.approx(math.sqrt(300), rel=0.02)
    fork = of.fork()
    FIXES["reinitialise"].apply(fork, ("first",))
    drawn = fork.model.get_parameter("first").detach()
    assert float(drawn.square().mean().sqrt()) == pytest.approx(math.sqrt(2 / 300), rel=0.02)
    assert torch.equal(
        fork.model.get_parameter("head.weight"), of.model.get_parameter("head.weight")
    )


@pytest.mark.parametrize("behind", [(), (nn.LogSoftmax(1),), (nn.Softmax(1),)])
def test_knowing_nothing_costs_the_logarithm_of_the_classes(behind: tuple[nn.Module, ...]) -> None:
    assert chance(setup(net(*behind))) == pytest.approx(math.log(5))


class Tied(nn.Module):
    """Scores of words by a product with the words' own vectors, behind a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.words = nn.Linear(300, 300), nn.Parameter(torch.randn(5, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.body(x)) @ self.words.T


@pytest.mark.parametrize(
    ("of", "known"),
    [
        (functional.cross_entropy, math.log(5)),
        (lambda z, y: (z.logsumexp(1) - z[torch.arange(len(z)), y]).mean(), None),
    ],
)
def test_a_cross_entropy_of_a_residual_model_has_a_constant_prediction(of: Any, known: Any) -> None:
    tied = setup(Tied(), lambda model, batch: of(model(batch[0]), batch[1]))
    assert chance(tied) == (known and pytest.approx(known))


class Heads(nn.Module):
    """Two heads on one body; the one of the classes is a stack of its own, and runs first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.classes, self.value = nn.Linear(300, 20), net(), nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.classes(x), self.value(self.body(x).relu_())[:, 0]


def of_heads(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    classes, value = model(batch[0])
    return functional.cross_entropy(classes, batch[1]) + (value - 1).square().mean()


@pytest.mark.parametrize("frozen", [False, True])
def test_each_head_is_a_last_layer(frozen: bool) -> None:
    model = Heads()
    model.classes.requires_grad_(not frozen)
    of = setup(model, of_heads)
    assert {path for path, weight in weights(of).items() if weight.last} == {"classes.2", "value"}
    assert chance(of) == pytest.approx(math.log(5) + 1)


def test_what_was_trained_or_loaded_is_told_from_what_was_drawn() -> None:
    loaded = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    assert not are_trained(setup(loaded))
    for p in loaded[1].parameters():
        p.data += 0.01 * torch.randn(8, generator=torch.Generator().manual_seed(0))
    assert are_trained(setup(loaded))
    counted = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    counted(torch.randn(16, 4))
    assert not are_trained(setup(counted)), "one pass, as in a test"
    for _ in range(20):
        counted(torch.randn(16, 4))
    assert are_trained(setup(counted))

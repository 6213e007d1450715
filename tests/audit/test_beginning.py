"""What does not train from the start: gains, identical units, constant losses, parts left out."""

import math
from typing import Any

import pytest
import torch
from audited import Batch, mlp, seen
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments.measure import chance
from adiv_monitor.audit.experiments.state import are_trained, weights
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.trials.fixes import FIXES
from adiv_monitor.diagnosis.record import Wiring


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


def test_parameters_that_no_layer_holds_have_gains() -> None:
    """The first is drawn without a scale."""
    torch.manual_seed(0)
    bare = {"first": nn.Parameter(torch.randn(300, 200)), "head": nn.Linear(200, 5)}
    bare["latents"] = nn.Parameter(torch.randn(200))
    of = setup(Computes(lambda m, x: m.head((x @ m.first + m.latents).relu()), **bare))
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


@pytest.mark.parametrize(
    ("of", "known"),
    [
        (functional.cross_entropy, math.log(5)),
        (lambda z, y: (z.logsumexp(1) - z[torch.arange(len(z)), y]).mean(), None),
    ],
)
def test_a_cross_entropy_of_a_residual_model_has_a_constant_prediction(of: Any, known: Any) -> None:
    """Scores of words are products with the words' own vectors."""
    parts = {"body": nn.Linear(300, 300), "words": nn.Parameter(torch.randn(5, 300))}
    model = Computes(lambda m, x: (x + m.body(x)) @ m.words.T, **parts)
    tied = setup(model, lambda model, batch: of(model(batch[0]), batch[1]))
    assert chance(tied) == (known and pytest.approx(known))


def heads() -> nn.Module:
    """Two heads on one body; the one of the classes is a stack of its own, and runs first."""
    parts = {"body": nn.Linear(300, 20), "classes": net(), "value": nn.Linear(20, 1)}
    return Computes(lambda m, x: (m.classes(x), m.value(m.body(x).relu_())[:, 0]), **parts)


def of_heads(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    classes, value = model(batch[0])
    return functional.cross_entropy(classes, batch[1]) + (value - 1).square().mean()


@pytest.mark.parametrize("frozen", [False, True])
def test_each_head_is_a_last_layer(frozen: bool) -> None:
    model = heads()
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


class Net(nn.Module):
    """A model with a detached branch, one multiplied by zero, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.cut = nn.Linear(6, 3)
        self.zero = nn.Linear(6, 3, bias=False)
        self.idle = nn.Linear(6, 3, bias=False)
        self.fixed = nn.Linear(6, 3, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.cut(x).detach() + 0 * self.zero(x) + self.fixed(x)


def test_each_fault_by_its_name() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.body.weight, model.cut.weight, model.zero.weight], lr=0.1)

    wiring = seen(Net(), optimizer=optimizer).wiring
    assert wiring.not_held == ("body.bias",)
    assert wiring.unreached == ("cut.weight", "cut.bias", "idle.weight")
    assert wiring.unused == ("idle.weight",)
    assert wiring.zero_gradient == ("zero.weight",)
    assert wiring.frozen == ("fixed.weight",)
    assert wiring.input_matters > 0.1


def test_a_sound_model_has_none() -> None:
    wiring = seen(mlp(nn.Dropout(), nn.BatchNorm1d(12))).wiring
    assert Wiring(input_matters=wiring.input_matters) == wiring


def ignoring(share: float) -> nn.Module:
    """Return a model that hears only this share of its input."""
    heard = lambda m, x, labels=None: nn.functional.dropout(m.map(share * x) + 1)  # noqa: E731
    return Computes(heard, map=nn.Linear(6, 3))


def named(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(x=batch[0], labels=batch[1]), batch[1])


def by_place(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(*batch), batch[1])


@pytest.mark.parametrize("loss", [named, by_place])
def test_inputs_that_make_no_difference(loss: Any) -> None:
    assert seen(ignoring(0), loss=loss).wiring.input_matters == 0
    assert seen(ignoring(1), loss=loss).wiring.input_matters > 0.1

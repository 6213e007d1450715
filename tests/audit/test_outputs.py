"""Detection of the outputs that a loss takes as logits, and of opposing parts of a loss."""

import pytest
from audit.fault_benchmark.once_alarming import GAN
from audit.fault_benchmark.run import STEPS
from audited import batches, cross_entropy, sgd
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments.loss_inputs import activated_output
from adiv_monitor.audit.experiments.measure import descent_share
from adiv_monitor.audit.training.setup import Loss, Setup
from adiv_monitor.diagnosis.record import ActivatedOutput


def setup(model: nn.Module, loss: Loss = cross_entropy, **given: object) -> Setup:
    given = {"optimizer": sgd(), "batches": tuple(batches()), "steps": 4, **given}
    return Setup(model, loss=loss, **given)  # type: ignore[arg-type]


def net(*behind: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3), *behind)


class Calls(nn.Module):
    """A model that applies a function to a layer's outputs."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    ("model", "name", "path"),
    [(net(nn.ReLU(inplace=True)), "relu", "3"), (net(nn.Hardtanh()), "hardtanh", "3"),
     (net(nn.Softmax(1)), "softmax", "3"), (Calls(lambda x: x.clamp(min=0)), "relu", ""),
     (Calls(lambda x: x.relu()[:, :3]), "relu", "")],
)  # fmt: skip
def test_a_function_behind_the_last_layer_is_told(model: nn.Module, name: str, path: str) -> None:
    assert activated_output(setup(model).fork()) == ActivatedOutput(name, path)


def test_a_sigmoid_is_told_where_the_loss_has_one() -> None:
    def with_one(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1] / 2)

    def without(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.binary_cross_entropy(model(batch[0])[:, 0], batch[1] / 2)

    assert activated_output(setup(net(nn.Sigmoid()), with_one).fork()) is not None
    assert activated_output(setup(net(nn.Sigmoid()), without).fork()) is None


def test_a_loss_falls_as_its_gradient_promises() -> None:
    for model in (net(), net(nn.BatchNorm1d(3)), net(nn.Dropout(0.5))):
        assert descent_share(setup(model)) == pytest.approx(1, abs=1e-6)
    scaled = setup(net(), lambda model, batch: 1e-3 * cross_entropy(model, batch))
    assert descent_share(scaled) == pytest.approx(1, abs=1e-6)


def test_two_players_oppose_each_other() -> None:
    for seed in range(4):
        share = descent_share(GAN.build(seed).setup(STEPS, seed))
        assert share is not None and share < 0.7

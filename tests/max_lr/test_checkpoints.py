"""Checkpoints of plain models and of parametrized ones, each loaded into the other."""

import copy

import pytest
import torch
from cases import Tied
from torch import Tensor, nn, optim

pytest.importorskip("scipy")

from adiv_monitor.alignment import Probe
from adiv_monitor.max_lr import PARAMETRIZATIONS, parametrize_model, plain_state_dict

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A model whose readout has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.projection = nn.Parameter(torch.randn(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) @ self.projection


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_plain_state_dicts_load_and_come_back(name: str) -> None:
    plain, other = Model(), Model()
    model = Model()
    parametrize_model(model, Probe(X), name)
    assert not torch.allclose(model(X), plain(X))
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(X), plain(X))
    optim.SGD(model.parameters(), lr=0.1)  # the same parameters as before
    other.load_state_dict(plain_state_dict(model))
    torch.testing.assert_close(other(X), plain(X))
    again = copy.deepcopy(model)
    parametrize_model(fresh := Model(), Probe(X), name)
    again.load_state_dict(fresh.state_dict())  # its own kind
    torch.testing.assert_close(again(X), fresh(X))
    again.load_state_dict(other.state_dict())
    torch.testing.assert_close(again(X), plain(X))
    torch.testing.assert_close(model(X), plain(X))
    part = {key.removeprefix("body."): x for key, x in fresh.state_dict().items() if "body" in key}
    model.body.load_state_dict(part)
    torch.testing.assert_close(model.body(X), fresh.body(X))


def test_a_weight_with_two_multipliers_has_no_plain_form() -> None:
    model = Tied(50, 32)
    parametrize_model(model, Probe(torch.arange(6)), "mup")
    with pytest.raises(ValueError, match=r"head\.weight is shared by layers that multiply it by"):
        plain_state_dict(model)
    with pytest.raises(RuntimeError, match=r"embed\.parametrizations\.weight\.original"):
        model.load_state_dict(Tied(50, 32).state_dict())


def test_a_weight_that_is_made_otherwise_too_is_refused() -> None:
    model = Model()
    nn.utils.parametrizations.weight_norm(model.body[0])
    parametrize_model(model, Probe(X), "mup")
    with pytest.raises(ValueError, match=r"body\.0\.weight has 2 parametrizations"):
        plain_state_dict(model)

"""Largest singular values and stable ranks of weights and updates, against singular values."""

import pytest
import torch
from setups import mlp, one_step
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.step.spectral import sigma, stable_rank


def low_rank(rank: int) -> Tensor:
    return torch.randn(200, rank, dtype=torch.float64) @ torch.randn(rank, 90, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["rank 1", "rank 3", "random", "wide", "float32", "large"])
def test_sigma_is_the_largest_singular_value(kind: str) -> None:
    torch.manual_seed(1)
    M = {
        "rank 1": low_rank(1),
        "rank 3": low_rank(3),
        "random": torch.randn(400, 400, dtype=torch.float64),
        "wide": torch.randn(3, 500, dtype=torch.float64),
        "float32": torch.randn(300, 200),
        "large": 1e10 * torch.randn(300, 200),
    }[kind]
    values = torch.linalg.svdvals(M.double())
    found = sigma(M).item()
    assert found == pytest.approx(values[0].item(), rel=0.02)
    assert found <= values[0] * (1 + 1e-6)
    if "rank" in kind:
        assert found == pytest.approx(values[0].item(), rel=1e-6)
    rank = (values.square().sum() / values[0] ** 2).item()
    assert stable_rank(M).item() == pytest.approx(rank, rel=0.04)


def test_a_layer_has_those_of_its_weight_and_update() -> None:
    model, batch = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def backward(model: nn.Module) -> None:
        functional.cross_entropy(model(batch[0]), batch[1]).backward()

    state = torch.get_rng_state()
    report = one_step(model, backward, spectral=True)
    assert torch.equal(state, torch.get_rng_state())
    for path, reading in report.layers.items():
        W = before[f"{path}.weight"]
        for name, M in (("weight", W), ("update", model.get_submodule(path).weight - W)):
            values = torch.linalg.svdvals(M)
            expected = values[0].item(), (values.square().sum() / values[0] ** 2).item()
            found = reading.own[f"{name}_sigma"], reading.own[f"{name}_stable_rank"]
            assert found == pytest.approx(expected, rel=0.02)


def test_a_weight_that_stays_has_an_update_without_direction() -> None:
    assert sigma(torch.zeros(3, 4)).isnan()

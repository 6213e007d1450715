"""Evaluations between a step and the next one: weights that are swapped in are no update."""

import copy

import pytest
import setups
import torch
from torch import nn
from torch.nn import functional

from adiv_monitor.report import StepReport


def trained(width: int, *, swaps: bool, clips: bool) -> list[StepReport]:
    """Train with an evaluation behind each step.

    Args:
        width: 300 makes the weight a large piece.
        swaps: averaged weights are swapped in for the evaluation, and back.
        clips: weights are clipped after each step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, width), nn.ReLU(), nn.Linear(width, 3))
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(16, 300), torch.arange(16) % 3

    def swap() -> None:
        for own, other in zip(model.parameters(), average.parameters(), strict=True):
            own.data, other.data = other.data, own.data

    @torch.no_grad()
    def evaluate(step: int) -> None:
        for parameter in model.parameters() if clips else ():
            parameter.clamp_(-0.03, 0.03)
        if swaps:
            swap()
        model.eval()(x)
        model.train()
        if swaps:
            swap()

    loss = lambda model: functional.cross_entropy(model(x), y)  # noqa: E731
    return setups.trained(model, loss, 4, optimizer=optimizer, after=evaluate)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("width", [8, 300])
def test_weights_that_are_swapped_in_for_an_evaluation_are_no_applied_update(
    width: int, clips: bool
) -> None:
    plain = trained(width, swaps=False, clips=clips)
    swapped = trained(width, swaps=True, clips=clips)
    for one, other in zip(plain, swapped, strict=True):
        assert one.layers == other.layers and one.notes == other.notes

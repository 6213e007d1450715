"""Several backward passes to one step: what each leaves in `.grad` is told from what was there."""

import copy

import pytest
import torch
from cases import CASES, loss_of
from setups import mlp, one_step, same
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor


def loss_of_part(model: nn.Module, batch: tuple[Tensor, Tensor], part: slice) -> Tensor:
    return functional.cross_entropy(model(batch[0][part]), batch[1][part], reduction="sum")


FIRST, SECOND = slice(0, 3), slice(3, 6)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_micro_batch_that_asks_for_nothing(hooked: bool) -> None:
    """Its gradient is zero, and zero over zero is no factor; its rows are idle."""
    model, batch = mlp()

    def in_turn(model: nn.Module) -> None:
        for weight, part in ((0.0, FIRST), (1.0, SECOND)):
            (weight * loss_of_part(model, batch, part)).backward()

    alone = one_step(copy.deepcopy(model), lambda m: loss_of_part(m, batch, SECOND).backward())
    if hooked:
        for parameter in model.parameters():
            parameter.register_hook(lambda g: 1.0 * g)
    found = one_step(model, in_turn)
    same(found, alone, but=("idle_share",))
    assert not found.notes
    for reading in found.layers.values():
        assert (reading.rows_total, reading.idle_share) == (6, 0.5)


class TwoHeads(nn.Module):
    """A head that the loss leaves out for now, and one that it doesn't."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, weight: float) -> Tensor:
        # The backward pass comes to the head that was called last first.
        used = self.used(x).square().sum()
        return used + weight * self.left_out(x).square().sum()


def test_a_layer_without_gradient_does_not_tell_whether_it_was_zeroed() -> None:
    _, (x, _) = mlp()
    torch.manual_seed(0)
    model = TwoHeads()

    def zeroed_between(model: nn.Module) -> None:
        model(x[FIRST], 0.0).backward()
        model.zero_grad(set_to_none=False)
        model(x[SECOND], 1.0).backward()

    alone = one_step(copy.deepcopy(model), lambda m: m(x[SECOND], 1.0).backward())
    found = one_step(model, zeroed_between)
    same(found, alone, but=("idle_share",))
    assert found.layers["used"].rows_total == 3
    assert found.layers["used"].idle_share == 0
    assert any("zeroed" in note for note in found.notes)


@pytest.mark.parametrize("changed", ["after a pass", "within a pass"])
def test_the_ceiling_follows_the_gradient(changed: str) -> None:
    """Rows that count less for the gradient count less for what could be attained."""
    model, batch = CASES["mlp"].model(), CASES["mlp"].batches(1, size=24)[0]
    halves = slice(0, 12), slice(12, 24)

    def in_turn(model: nn.Module, first: float, between: float) -> None:
        (first * loss_of_part(model, batch, halves[0])).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(between)
        loss_of_part(model, batch, halves[1]).backward()

    options = {"attainable": True, "max_rows": None}
    expected = one_step(copy.deepcopy(model), lambda m: in_turn(m, 1e-2, 1.0), **options)
    if changed == "within a pass":
        for parameter in model.parameters():
            factors = iter((1e-2, 1.0))
            parameter.register_hook(lambda g, factors=factors: next(factors) * g)
    between = 1e-2 if changed == "after a pass" else 1.0
    found = one_step(model, lambda m: in_turn(m, 1.0, between), **options)
    same(found, expected, loosely=True)
    for reading in found.layers.values():
        assert reading.attainable_cosine is not None
        assert reading.gradient_cosine <= reading.attainable_cosine + 1e-12


def test_an_edited_gradient_is_what_a_plain_step_would_take() -> None:
    """Few rows would tell ΦΦᵀG, which an edit makes another thing: from the second step on Φγᵀ."""
    model, batch = mlp()
    batch = batch[0][:2], batch[1][:2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            (100 * loss_of(model, batch)).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
    report = monitor.latest
    assert report is not None
    assert any("by more than a factor" in note for note in report.notes)
    for reading in report.layers.values():  # plain gradient descent
        assert reading.gradient_cosine == pytest.approx(reading.update_cosine, rel=1e-9)

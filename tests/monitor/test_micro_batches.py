"""Several backward passes per step: each pass's share of `.grad` is separated from earlier ones."""

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from cases import CASES
from setups import mlp, one_step, same
from torch import Tensor, nn
from torch.nn import functional


def loss_of_part(model: nn.Module, batch: tuple[Tensor, Tensor], part: slice) -> Tensor:
    return functional.cross_entropy(model(batch[0][part]), batch[1][part], reduction="sum")


FIRST, SECOND = slice(0, 3), slice(3, 6)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_micro_batch_that_asks_for_nothing(hooked: bool) -> None:
    """A zero gradient has no defined factor; its rows are zero-gradient rows."""
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


class Uses(nn.Module):
    """A function of a batch and of a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def class_token(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([w.expand(len(x), -1, -1), x], 1)


EMPTY: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(5),
    "class token": lambda: Uses(class_token, torch.randn(1, 1, 4)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0),
}


FIRST_OR_SECOND = [(name, sizes) for name in EMPTY for sizes in ((0, 3, 3), (3, 0, 3))]


@pytest.mark.parametrize(("name", "sizes"), FIRST_OR_SECOND)
def test_an_empty_micro_batch_leaves_the_readings_alone(name: str, sizes: Sequence[int]) -> None:
    torch.manual_seed(0)
    model = EMPTY[name]().double()
    parts = [torch.randn(size, 5, 4).double() for size in sizes]

    def in_turn(model: nn.Module, parts: list[Tensor]) -> None:
        for x in parts:
            model(x).square().sum().backward()

    options: dict[str, object] = {"max_rows": None, "attention": name == "attention"}
    some = [x for x in parts if len(x)]
    expected = one_step(copy.deepcopy(model), lambda m: in_turn(m, some), **options)
    found = one_step(model, lambda m: in_turn(m, parts), **options)
    same(found, expected)
    assert (found.unsupported, found.notes) == (expected.unsupported, expected.notes)
    assert found.attention.keys() == expected.attention.keys()
    assert bool(found.attention) == (name == "attention")


class TwoHeads(nn.Module):
    """A model with one head that the loss ignores for now, and one that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, weight: float) -> Tensor:
        # The backward pass reaches the head that was called last first.
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


def test_the_ceiling_follows_the_gradient() -> None:
    """Rows with less weight in the gradient have less weight in the ceiling."""
    model, batch = CASES["mlp"].model(), CASES["mlp"].batches(1, size=24)[0]
    halves = slice(0, 12), slice(12, 24)

    def in_turn(model: nn.Module, first: float, between: float) -> None:
        (first * loss_of_part(model, batch, halves[0])).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(between)
        loss_of_part(model, batch, halves[1]).backward()

    options = {"attainable": True, "max_rows": None}
    expected = one_step(copy.deepcopy(model), lambda m: in_turn(m, 1e-2, 1.0), **options)
    found = one_step(model, lambda m: in_turn(m, 1.0, 1e-2), **options)
    same(found, expected, loosely=True)
    for reading in found.layers.values():
        assert reading.gradient_cosine <= reading.attainable_cosine + 1e-12


@pytest.mark.parametrize("again", [False, True], ids=["", "one graph twice"])
def test_every_pass_counts_as_what_it_was_multiplied_by_since(again: bool) -> None:
    model, batch = CASES["mlp"].model(), CASES["mlp"].batches(1, size=24)[0]
    parts = [slice(start, start + 6) for start in range(0, 24, 6)]
    factors = (0.5, 3.0, 0.1)

    def in_turn(model: nn.Module) -> None:
        graph = loss_of_part(model, batch, parts[0])
        graph.backward(retain_graph=again)
        for part, factor in zip(parts[1:], factors, strict=True):
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
            loss_of_part(model, batch, part).backward()
        if again:
            graph.backward()

    def at_once(model: nn.Module) -> None:
        weights = [math.prod(factors[i:]) for i in range(len(parts))]
        weights[0] += again
        losses = [loss_of_part(model, batch, part) for part in parts]
        sum(weight * loss for weight, loss in zip(weights, losses, strict=True)).backward()

    options = {"max_rows": None}
    expected = one_step(copy.deepcopy(model), at_once, **options)
    same(one_step(model, in_turn, **options), expected, loosely=True)


def test_the_ceiling_forgets_what_was_zeroed() -> None:
    model, batch = CASES["mlp"].model(), CASES["mlp"].batches(1, size=36)[0]
    first, second = slice(0, 12), slice(12, 36)

    def in_turn(model: nn.Module) -> None:
        loss_of_part(model, batch, first).backward()
        model.zero_grad()
        loss_of_part(model, batch, second).backward()

    expected = one_step(
        copy.deepcopy(model), lambda m: loss_of_part(m, batch, second).backward(), attainable=True
    )
    same(one_step(model, in_turn, attainable=True), expected)

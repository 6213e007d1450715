"""Several backward passes per step: each pass's share of `.grad` is separated from earlier ones."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
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
    "convolution": lambda: nn.Conv1d(5, 3, 2, dilation=2),
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

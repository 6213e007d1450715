"""Cuts beside a block, zero factors, norms and nodes, and weights that are not registered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trial_setups import answer, batches, setup

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis.record import Fact


def asked(name: str, of: Setup) -> tuple[Fact, ...]:
    fork = of.fork()
    train(fork)
    found = answer(name, of, fork)
    assert not found.untold
    return found.facts


class Made(nn.Module):
    """A perceptron with a function between its layers."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(12, 16), nn.Linear(16, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


def of(between: Callable[[Tensor], Tensor]) -> Setup:
    return setup(model=Made(between), steps=4)


@pytest.mark.parametrize(
    ("between", "count"),
    [
        (lambda x: x.data + x.relu(), 1),  # a block whose own path is cut
        (lambda x: x + (x.round() - x).detach(), 0),  # straight through
    ],
)
def test_a_path_that_is_cut_beside_a_block_is_named(
    between: Callable[[Tensor], Tensor], count: int
) -> None:
    assert len(asked("gradient-cut", of(between))) == count


def test_a_branch_times_zero_is_named_and_a_learnt_gate_is_not() -> None:
    gate = nn.Parameter(torch.zeros(1))
    assert asked("zero-factor", of(lambda x: x + (4 // 8) * x.relu()))
    assert not asked("zero-factor", of(lambda x: torch.stack([k * x for k in (0, 1)]).sum(0)))
    assert not asked("zero-factor", of(lambda x: x + gate * x.relu()))


class Heads(nn.Module):
    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(12, 8), nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(self.body(x).tanh()) for head in self.heads], 1)


def test_heads_that_are_one_object_are_named_and_equal_ones_are_not() -> None:
    torch.manual_seed(0)
    one = asked("outputs-tied", setup(model=Heads([nn.Linear(8, 1)] * 3), steps=4))
    assert [fact.numbers for fact in one] == [{"outputs": 3.0}]
    heads = [nn.Linear(8, 1) for _ in range(3)]
    for head in heads:  # alike before training only
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    assert not asked("outputs-tied", setup(model=Heads(list[nn.Module](heads)), steps=4))


def test_heads_of_their_own_tensors_are_compared_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = self.other = nn.Linear(12, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(x), self.other(x)[:, 0]

    def both(model: nn.Module, batch: Any) -> Tensor:
        one, other = model(batch[0])
        return (one[:, 0] - batch[0][:, 0]).square().mean() + (other - batch[1]).square().mean()

    (fact,) = asked("outputs-tied", setup(model=Two(), loss=both, steps=4))
    assert fact.numbers == {"outputs": 2.0}


@pytest.mark.parametrize(
    ("between", "count"),
    [
        (lambda h: h + h, 1),
        (lambda h: torch.add(h, h), 1),
        (lambda h: 2 * h, 0),
        (lambda h: h + h.relu(), 0),
        (lambda h: h + h.clone(), 0),
    ],
)
def test_a_sum_of_one_tensor_is_named(between: Callable[[Tensor], Tensor], count: int) -> None:
    assert len(asked("added-to-itself", of(between))) == count


def test_a_loss_may_add_a_tensor_to_itself() -> None:
    assert not asked("added-to-itself", setup(loss=lambda m, b: (x := m(b[0]).square().mean()) + x))


class LowRank(nn.Module):
    """A layer beside a product of two factors, of which the first begins at a scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.a = nn.Linear(12, 3), nn.Parameter(scale * torch.randn(2, 12))
        self.b = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize(("scale", "names"), [(0.0, ["a", "b"]), (0.1, [])])
def test_two_factors_that_begin_at_zero_are_named(scale: float, names: list[str]) -> None:
    found = asked("zero-factor", setup(model=LowRank(scale), steps=4))
    assert [fact.place for fact in found] == names


def test_zeros_in_place_of_all_weights_are_no_factors() -> None:
    model = LowRank(0.0)
    nn.init.zeros_(model.layer.weight)
    assert not asked("zero-factor", setup(model=model, steps=4))


@pytest.mark.parametrize("keeps", [True, False])
def test_a_norm_that_its_own_train_keeps_in_eval_mode_is_named(keeps: bool) -> None:
    class Kept(nn.Sequential):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self[1].train(mode and not keeps)
            return self

    model = Kept(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    found = asked("left-in-eval", setup(model=model, steps=4))
    assert [fact.place for fact in found] == ["1"] * keeps


@pytest.mark.parametrize(("divides", "most"), [(False, 32.0), (True, None)])
def test_rows_that_a_matrix_sums_are_counted(divides: bool, most: float | None) -> None:
    """As the neighbours of a node, with or without a division by their number."""
    by = torch.ones(32, 32).tril()
    by = by / by.sum(1, keepdim=True) if divides else by
    for matrix in (by, by.to_sparse()):
        found = asked("row-spread", of(lambda x, matrix=matrix: matrix @ x))
        assert [fact.numbers["most"] for fact in found] == [most] * (most is not None)


def test_nodes_of_a_graph_are_no_samples() -> None:
    def of_nodes(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch[:2]
        return nn.functional.cross_entropy(model(batch[2].T @ x), y)

    edges = (torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    given = setup(batches=[(x, y, edges) for x, y in batches()], loss=of_nodes, steps=4)
    fork = given.fork()
    assert "edges of a graph" in answer("samples-mixed", given, fork).untold

"""One parameter in several uses, parameters that are replaced, calls without rows, and no leaks."""

import gc

import pytest
import torch
from setups import EXACT, cosine, one_step
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor
from adiv_monitor.capture.capture import Capture

X = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3).sin()


class Tied(nn.Module):
    """An auto-encoder: one matrix there and, transposed, back; written in two ways."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, 3, dtype=torch.float64))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        z = functional.linear(x, self.weight)
        hidden = torch.tanh(z)
        y = hidden @ self.weight
        self.seen = [x, z, hidden.detach(), y]
        for output in (z, y):
            output.retain_grad()
        return y


@pytest.mark.parametrize("hidden", [3, 6], ids=["square", "wide"])
def test_a_matrix_and_its_transpose_are_two_layers(hidden: int) -> None:
    torch.manual_seed(1)
    model = Tied(hidden)
    report = one_step(model, lambda m: (m(X) ** 3).sum().backward(), max_rows=None)
    there, back = report.layers.values()
    x, z, hidden_, y = model.seen
    gamma = model.weight.grad
    assert gamma is not None
    for reading, inputs, output, change in (
        (there, x, z, gamma.T),
        (back, hidden_, y, gamma),
    ):
        assert output.grad is not None
        assert reading.rows_total == 5
        assert reading.gradient_cosine == pytest.approx(
            cosine(inputs @ change, output.grad), **EXACT
        )


def test_one_kernel_there_and_back() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, 3, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(functional.conv2d(x, self.weight))
            return functional.conv_transpose2d(hidden, self.weight)

    report = one_step(Convolved(), lambda m: m(torch.randn(2, 3, 5, 5).double()).sum().backward())
    assert [reading.rows_total for reading in report.layers.values()] == [18, 50]
    assert not report.unsupported


def test_experts_without_tokens_have_a_ceiling() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(2)).double()

        def forward(self, x: Tensor) -> Tensor:
            first = x[:, 0] > -5  # all of them
            out = x.new_zeros(len(x), 2)
            for expert, mask in zip(self.experts, (first, ~first), strict=True):
                out[mask] = expert(x[mask])
            return out

    report = one_step(Experts(), lambda m: m(X).square().sum().backward(), attainable=True)
    assert report.layers["experts.0"].attainable_cosine == pytest.approx(1, abs=1)
    assert report.coverage == 1.0
    assert not report.notes


def test_a_parameter_that_is_replaced_in_a_measured_step() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        model[1].weight = nn.Parameter(model[1].weight.detach().clone())
        model(X).square().sum().backward()
        optimizer.step()
    assert monitor.latest is not None
    assert monitor.latest.layers.keys() >= {"0"}
    assert "1.weight" in monitor.latest.unmeasured


def test_nothing_of_a_measured_step_outlives_it() -> None:
    """Not even where a tensor does, as one that autograd keeps for good."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.table(tokens) @ torch.tanh(self.weight)
            return functional.linear(hidden, self.table.weight)

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, every_n_steps=1, keep=1, on_error="raise"):
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randint(5, (2, 3))).square().mean().backward()
            optimizer.step()
        gc.collect()
        assert sum(type(thing) is Capture for thing in gc.get_objects()) <= 2

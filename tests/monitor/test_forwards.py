"""The watch over a forward pass is active when needed, removed afterwards, and has no effect."""

import copy
from collections.abc import Callable

import pytest
import torch
from setups import one_step, same
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from adiv_monitor import Monitor


def modes() -> list[object]:
    found: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return found


def hooks_of(model: nn.Module) -> list[object]:
    tables = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    return [hook for m in model.modules() for name in tables for hook in vars(m)[name].items()]


class Net(nn.Module):
    """Two layers, one of them used without being called, and a function called in between."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        self.shift = nn.Parameter(torch.randn(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(self.first(x))
        return functional.linear(hidden, self.second.weight, self.second.bias) + self.shift


def net(between: Callable[[Tensor], Tensor] = lambda x: x) -> Net:
    torch.manual_seed(0)
    return Net(between).double()


X = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)


def loss(model: nn.Module) -> None:
    model(X).square().sum().backward()


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        if wrong:
            raise ZeroDivisionError
        return x

    model, wrong = net(fails), True
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        with pytest.raises(ZeroDivisionError):
            loss(model)
        assert not modes()
        wrong = False
        loss(model)
        assert not modes()
        optimizer.step()
    assert monitor.latest is not None
    same(monitor.latest, one_step(net(), loss))
    assert not hooks_of(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_functions_that_use_parameters(reentrant: bool) -> None:
    """Checkpointed functions are seen when a module is called in the recomputation."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.last = nn.Linear(2, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.net, x, use_reentrant=reentrant) if kept else self.net(x)
            return self.last(hidden)

    torch.manual_seed(3)
    model, kept = Outer(), True
    twin = copy.deepcopy(model)
    x = X.clone().requires_grad_()
    report = one_step(model, lambda m: m(x).square().sum().backward(), max_rows=None)
    kept = False
    same(report, one_step(twin, lambda m: m(x).square().sum().backward(), max_rows=None))
    assert report.coverage == 1.0


def test_a_model_that_is_called_in_parts() -> None:
    """A model whose parts are called, but never its own forward, is measured."""
    whole, parts = net(), net()

    def in_parts(model: nn.Module) -> None:
        assert isinstance(model, Net)
        hidden = model.first(X)
        (model.second(hidden) + model.shift).square().sum().backward()

    expected, found = one_step(whole, loss), one_step(parts, in_parts)
    assert found.layers.keys() == {"first", "second"}
    for path in found.layers:
        assert found.layers[path].measures() == pytest.approx(
            expected.layers[path].measures(), rel=1e-9, nan_ok=True
        )
    assert "outside" in found.unsupported["shift"]

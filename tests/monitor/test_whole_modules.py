"""Parameters without a rule are measured through their module, or refused with a reason.

`test_derived.py` compares the readings with torch's own derivatives.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from computes import Computes
from setups import one_step, same
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Bent(nn.Module):
    """A learned activation and a learned power."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.randn(4))
        self.power = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        bent = x * torch.special.expit(torch.logaddexp(self.beta, x))
        return (bent.abs() + 0.1) ** self.power


class Hidden(torch.autograd.Function):
    """x·eʷ as a custom function with a reverse-mode derivative only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w.exp(), (gradient * x * w.exp()).sum_to_size(w.shape)


class OnlyOnce(Hidden):
    """A custom function whose backward is not differentiable."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return Hidden.backward(ctx, gradient)


class Custom(nn.Module):
    """A layer of a custom function."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor] = Hidden.apply) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.function(torch.sin(x), self.w))


class Borrowing(Custom):
    """A layer of a custom function that takes the weight of a module, as Unsloth's LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.w = None  # type: ignore[assignment]
        self.lora_A = nn.Linear(4, 1, bias=False)  # not called

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.function(torch.sin(x), self.lora_A.weight))


def wrapped(inner: nn.Module) -> nn.Module:
    """Return the module behind a linear layer: it is not the root, and its input requires grad."""
    parts = {"first": nn.Linear(4, 4), "inner": inner}
    return Computes(lambda m, x: m.inner(m.first(x)), **parts).double()


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def total(z: Tensor) -> Tensor:
    """Return a loss in which every entry has another weight, some of them zero."""
    weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape)
    return (weights * z + z**2 / 9).sum()


@pytest.mark.parametrize(("made", "layer"), [(Custom, "inner.w"), (Borrowing, "inner.lora_A")])
def test_a_custom_function_reads_as_its_formula(made: type[Custom], layer: str) -> None:
    torch.manual_seed(3)
    model, x = wrapped(made()), data(6, 4)
    plain = copy.deepcopy(model)
    plain.inner.function = lambda x, w: x * w.exp()
    found, expected = (
        one_step(each, lambda m: total(m(x)).backward(), max_rows=None) for each in (model, plain)
    )
    assert found.layers[layer].kind == "module"
    assert (found.coverage, found.notes) == (1, ())
    same(found, expected)


def test_parameters_that_a_module_uses_in_other_calls_are_other_layers() -> None:
    def forward(m: nn.Module, x: Tensor, i: int) -> Tensor:
        return (x * torch.logaddexp(m.of[i], x)).abs() ** m.of[i + 1]

    bank = Computes(forward, of=nn.ParameterList(torch.rand(6, 4).unbind())).double()
    report = one_step(bank, lambda m: total(m(m(m(data(6, 4), 0), 2), 4)).backward())
    assert (len(report.layers), report.coverage) == (3, 1)


# --- reasons for modules that cannot be measured -------------------------------------------------


class Changing(Bent):
    """A module with another output at every call for the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class InPlace(Bent):
    """A module that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        x.data.mul_(2)
        return z


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a state": (Changing, "returned another output"),
    "an input": (InPlace, "returned another output"),
    "a backward": (lambda: Custom(OnlyOnce.apply), "can't be run again with derivatives"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_says_why(name: str) -> None:
    build, reason = REFUSED[name]
    model, x = wrapped(build()), data(6, 4)
    report = one_step(model, lambda m: total(m(x)).backward())
    assert report.layers.keys() == {"first"}
    assert reason in report.unsupported["inner"]
    assert "register_features" in report.unsupported["inner"]


def test_what_a_module_leaves_unused_is_not_claimed() -> None:
    """The parent's parameter acts through the parent, not through a child that ran."""
    parts = {"child": Bent(), "spare": Bent()}
    parent = Computes(lambda m, x: Hidden.apply(m.child(x), m.spare.beta), **parts)
    model, x = nn.Sequential(nn.Linear(4, 4), parent).double(), data(6, 4)
    report = one_step(model, lambda m: total(m(x)).backward())
    assert report.layers.keys() == {"0", "1.child", "1.spare.beta"}
    assert report.unsupported == {"1.spare.power": "no gradient reached it in this step"}
    assert math.isfinite(report.layers["1.spare.beta"].update_cosine)

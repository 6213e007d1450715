"""Parameters without a rule are measured through their module, or refused with a reason.

`test_derived.py` compares the readings with torch's own derivatives.
"""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from setups import EXACT, one_step, same
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from adiv_monitor import Monitor


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


class Noisy(nn.Module):
    """Dropout and batch normalisation around a learned power."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.rand(4))
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        random.random(), np.random.random()
        return self.norm((self.drop(x.abs()) + 0.5) ** self.power)


class Wrapped(nn.Module):
    """The module behind a linear layer: it is not the root, and its input requires grad."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.first(x))


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def total(z: Tensor) -> Tensor:
    """Return a loss in which every entry has another weight, some of them zero."""
    weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape)
    return (weights * z + z**2 / 9).sum()


@pytest.mark.parametrize(("made", "layer"), [(Custom, "inner.w"), (Borrowing, "inner.lora_A")])
def test_a_custom_function_reads_as_its_formula(made: type[Custom], layer: str) -> None:
    torch.manual_seed(3)
    model, x = Wrapped(made()).double(), data(6, 4)
    plain = copy.deepcopy(model)
    plain.inner.function = lambda x, w: x * w.exp()
    found, expected = (
        one_step(each, lambda m: total(m(x)).backward(), max_rows=None) for each in (model, plain)
    )
    assert found.layers[layer].kind == "module"
    assert (found.coverage, found.notes) == (1, ())
    same(found, expected)


def test_calls_share_the_rows() -> None:
    """Rows come from all calls of a module called three times in each of two micro-batches."""
    torch.manual_seed(3)
    inputs = [data(4, 4), data(3, 4)]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Bent()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x).sin())

    model = Twice().double()

    def backward(model: nn.Module) -> None:
        for x in inputs:
            total(model(x)).backward()

    for max_rows, seen in ((None, 14), (5, 5)):
        reading = one_step(copy.deepcopy(model), backward, max_rows=max_rows).layers["inner"]
        assert (reading.rows_seen, reading.rows_total) == (seen, 14)


# --- the unaffected run --------------------------------------------------------------------------


class Stateful(nn.Module):
    """A module with everything that reveals a second run: states, hooks, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = Noisy()
        self.last = spectral_norm(nn.Linear(4, 4))
        self.register_buffer("calls", torch.zeros(()))
        self.penalties: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z = self.noisy(x)
        self.penalties.append(z.square().mean())
        return functional.dropout(self.last(z), 0.3)


def test_the_run_is_the_same_to_the_last_bit() -> None:
    def train(monitored: bool) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Stateful()
        called: list[int] = []
        model.noisy.norm.register_forward_hook(lambda *_: called.append(1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        monitor = Monitor(model, optimizer, every_n_steps=1, max_rows=2, on_error="raise")
        if monitored:
            monitor.attach()
        else:
            monitor.close()
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean() + sum(model.penalties)
            loss.backward()
            model.penalties.clear()
            optimizer.step()
            found.append(loss.detach())
        monitor.close()
        for report in monitor.reports:
            assert not report.unsupported
            assert report.coverage == 1
        assert len(called) == 3
        assert not model.noisy._forward_hooks
        drawn = torch.tensor([random.random(), np.random.random()])
        return [*found, *model.state_dict().values(), torch.get_rng_state(), drawn]

    for a, b in zip(train(False), train(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing(reentrant: bool) -> None:
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(4, 4), Custom()).double(), data(6, 4)
    plain = one_step(copy.deepcopy(model), lambda m: total(m(x)).backward())

    def backward(model: nn.Module) -> None:
        hidden = model[0](x)
        total(checkpoint(model[1], hidden, use_reentrant=reentrant)).backward()

    found = one_step(model, backward).layers["1.w"].measures()
    assert found == pytest.approx(plain.layers["1.w"].measures(), **EXACT)


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
    model, x = Wrapped(build()).double(), data(6, 4)
    report = one_step(model, lambda m: total(m(x)).backward())
    assert report.layers.keys() == {"first"}
    assert reason in report.unsupported["inner"]
    assert "register_features" in report.unsupported["inner"]


def test_what_a_module_leaves_unused_is_not_claimed() -> None:
    """The parent's parameter acts through the parent, not through a child that ran."""

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Bent()
            self.spare = Bent()

        def forward(self, x: Tensor) -> Tensor:
            return Hidden.apply(self.child(x), self.spare.beta)

    model, x = nn.Sequential(nn.Linear(4, 4), Parent()).double(), data(6, 4)
    report = one_step(model, lambda m: total(m(x)).backward())
    assert report.layers.keys() == {"0", "1.child", "1.spare.beta"}
    assert report.unsupported == {"1.spare.power": "no gradient reached it in this step"}
    assert math.isfinite(report.layers["1.spare.beta"].update_cosine)

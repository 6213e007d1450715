"""Parameters without a rule are measured through their module; float64, against slow Jacobians.

The reference computes the Jacobian of the module's output by one reverse-mode derivative per
output, on the inputs of the module's call, and moves the parameters by a small step.
"""

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from setups import one_step
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from adiv_monitor import Monitor

EXACT = {"rel": 1e-9, "abs": 1e-12}


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


class Attending(nn.Module):
    """Fused attention, which has no forward-mode derivative, behind a learned power."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        bent = ((x.abs() + 0.5) ** self.power)[:, None]
        return functional.scaled_dot_product_attention(bent, bent, bent, is_causal=True)[:, 0]


class Wrapped(nn.Module):
    """The module behind a linear layer: it is not the root, and its input requires grad."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.inner(self.first(x), **kwargs)


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def total(z: Tensor) -> Tensor:
    """Return a loss in which every entry has another weight, some of them zero."""
    weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape)
    return (weights * z + z**2 / 9).sum()


@dataclass
class Truth:
    """The rows of one module at one step, (rows, n)."""

    G: Tensor
    z: Tensor
    e: Tensor
    d: Tensor
    descent: float


def truth(
    model: nn.Module,
    inner: nn.Module,
    names: list[str],
    backward: Callable[[nn.Module], None],
    seed: int | None = None,
) -> Truth:
    """Return the effect of an SGD step with η = 0.1 on the rows of `inner`."""
    inputs: list[Tensor] = []
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        inputs.append(args[0].detach().clone())
        output.retain_grad()
        seen.append(output)

    handle = inner.register_forward_hook(look)
    before = copy.deepcopy(inner)
    backward(model)
    handle.remove()
    gradients = [inner.get_parameter(name).grad for name in names]
    start = [before.get_parameter(name).detach() for name in names]

    def outputs(*values: Tensor) -> Tensor:
        module, rows = copy.deepcopy(before), []
        module._forward_hooks.clear()
        for x in inputs:
            if seed is not None:
                torch.manual_seed(seed)
            changed = dict(zip(names, values, strict=True))
            rows.append(torch.func.functional_call(module, changed, (x,)).flatten(0, -2))
        return torch.cat(rows)

    z = outputs(*start).detach()
    jacobians = torch.autograd.functional.jacobian(outputs, tuple(start), vectorize=False)
    e = sum(
        (j.reshape(*z.shape, -1) @ g.flatten() for j, g in zip(jacobians, gradients, strict=True)),
        torch.zeros_like(z),
    )
    G = torch.cat([z.grad.flatten(0, -2) for z in seen])
    descent = 0.1 * sum(float(g.square().sum()) for g in gradients)
    return Truth(G, z, e, 0.1 * e, descent)


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / a.norm() / b.norm())


def expected(found: Truth) -> dict[str, float]:
    rows = [cosine(d, g) for d, g in zip(found.d, found.G, strict=True)]  # NaN: no movement
    moving = [c for c in rows if not math.isnan(c)]
    return {
        "update_cosine": cosine(found.d, found.G),
        "gradient_cosine": cosine(found.e, found.G),
        "effective_lr": float((found.d * found.G).sum() / found.G.square().sum()),
        "update_ratio": float(found.d.norm() / found.z.norm()),
        "descent": found.descent,
        "row_cosine_mean": sum(moving) / len(moving),
        "harmed_fraction": sum(c < 0 for c in rows) / len(rows),
        "idle_share": 0.0,
        "parameter_cosine": 1.0,
        "projection_cosine": 1.0,
        "applied_cosine": 1.0,
    }


CASES: dict[str, tuple[Callable[[], nn.Module], list[str], Sequence[int], str]] = {
    "learned activation": (Bent, ["beta", "power"], (6, 4), "inner"),
    "custom function": (Custom, ["w"], (6, 4), "inner.w"),
    "fused attention": (Attending, ["power"], (3, 5, 4), "inner.power"),
    "dropout and batch norm": (Noisy, ["power"], (8, 4), "inner.power"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_measure(name: str) -> None:
    build, names, shape, path = CASES[name]
    torch.manual_seed(3)
    model, x = Wrapped(build()).double(), data(*shape)

    def backward(model: nn.Module) -> None:
        torch.manual_seed(5)
        total(model(x)).backward()

    twin = copy.deepcopy(model)
    found = truth(twin, twin.inner, names, backward, seed=5)
    report = one_step(model, backward, max_rows=None)
    assert report.coverage == 1
    assert not report.unsupported
    assert not report.notes
    reading = report.layers[path]
    assert reading.kind == "module"
    assert reading.rows_seen == reading.rows_total == len(found.G)
    assert not reading.standard_error
    measures = reading.measures()
    quantiles = {f"row_cosine_{level}" for level in ("p05", "p50", "p95")}
    wanted = expected(found)
    assert measures.keys() == wanted.keys() | quantiles
    for measure, value in wanted.items():
        assert measures[measure] == pytest.approx(value, **EXACT), measure


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
    twin = copy.deepcopy(model)

    def backward(model: nn.Module) -> None:
        for x in inputs:
            total(model(x)).backward()

    found = truth(twin, twin.inner, ["beta", "power"], backward)
    reading = one_step(copy.deepcopy(model), backward, max_rows=None).layers["inner"]
    assert reading.rows_seen == 14
    wanted = expected(found)
    assert {k: reading.measures()[k] for k in wanted} == pytest.approx(wanted, **EXACT)
    assert one_step(model, backward, max_rows=5).layers["inner"].rows_seen == 5


# --- the unaffected run --------------------------------------------------------------------------


class Stateful(nn.Module):
    """A module with everything that reveals a second run: states, hooks, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = Noisy()
        self.last = nn.Linear(4, 4)
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


class Unsaid(Bent):
    """A module whose input cannot be copied."""

    def forward(self, x: Tensor, more: object = None) -> Tensor:
        return super().forward(x)


def generator() -> object:
    yield 1


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a state": (Changing, {}, "returned another output"),
    "an input": (InPlace, {}, "returned another output"),
    "a backward": (lambda: Custom(OnlyOnce.apply), {}, "can't be run again with derivatives"),
    "an argument": (Unsaid, {"more": generator()}, "cannot pickle"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_says_why(name: str) -> None:
    build, kwargs, reason = REFUSED[name]
    model, x = Wrapped(build()).double(), data(6, 4)
    report = one_step(model, lambda m: total(m(x, **kwargs)).backward())
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

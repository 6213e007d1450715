"""Every row of docs/optimizers.md, on what is exact for which optimizer, holds, as by hand."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from setups import EXACT, cosine, trained
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import LayerReading, Monitor
from adiv_monitor.report import StepReport

STEPS, LAYERS = 3, ("0", "2")
COMPARED = {
    *("update_cosine", "gradient_cosine", "effective_lr", "harmed_fraction", "descent"),
    *("parameter_cosine", "projection_cosine", "applied_cosine"),
}
Parameters = Iterable[nn.Parameter]


def data() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False))
    return model.double(), torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))


class Written(torch.optim.Optimizer):
    """An optimizer of this file: `move(p, γ, state, rate)` changes one parameter."""

    def __init__(self, parameters: Parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.move(p, p.grad, self.state[p], self.param_groups[0]["lr"])


class Lion(Written):
    """Lion: the sign of an interpolated momentum (Chen et al. 2023)."""

    def move(self, p: Tensor, gamma: Tensor, state: dict[str, Any], rate: float) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        p.sub_((0.9 * m + 0.1 * gamma).sign(), alpha=rate)
        m.lerp_(gamma, 0.01)


class Shampoo(Written):
    """Shampoo: L^(-1/4) γ R^(-1/4) with sums of γγᵀ and γᵀγ (Gupta et al. 2018)."""

    def move(self, p: Tensor, gamma: Tensor, state: dict[str, Any], rate: float) -> None:
        sides = []
        for name, square in (("L", gamma @ gamma.T), ("R", gamma.T @ gamma)):
            state[name] = state.get(name, 1e-4 * torch.eye(len(square)).to(p)) + square
            values, vectors = torch.linalg.eigh(state[name])
            sides.append(vectors * values**-0.25 @ vectors.T)
        p.sub_(sides[0] @ gamma @ sides[1], alpha=rate)


class ScheduleFree(Written):
    """Schedule-free SGD: θ lies between an iterate z and the average x (Defazio et al. 2024)."""

    def move(self, p: Tensor, gamma: Tensor, state: dict[str, Any], rate: float) -> None:
        x, z = (state.setdefault(name, p.detach().clone()) for name in ("x", "z"))
        state["count"] = state.get("count", 0) + 1
        z.sub_(gamma, alpha=rate)
        x.lerp_(z, 1 / state["count"])
        p.copy_(0.1 * z + 0.9 * x)


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.02)


optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "SGD, momentum, decay": partial(
        optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam": partial(optim.Adam, lr=0.01),
    "AdamW, foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW, fused": partial(optim.AdamW, lr=0.01, fused=True),
    "AdamW, amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    **{
        name: partial(getattr(optim, name), lr=0.01)
        for name in (
            *("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "Muon", "NAdam", "RAdam"),
            *("RMSprop", "Rprop"),
        )
    },
    "Lion": partial(Lion, lr=0.01),
    "Shampoo": partial(Shampoo, lr=0.1),
    "schedule-free": partial(ScheduleFree, lr=0.1),
    "clipping by norm": sgd,
    "clipping by value": sgd,
}
BETWEEN = {"clipping by norm": clip_norm, "clipping by value": clip_value}


def truths(name: str) -> list[dict[str, dict[str, float]]]:
    """Run the same training without a monitor; return the reference's measures of its steps."""
    model, x, y = data()
    optimizer = OPTIMIZERS[name](list(model.parameters()))

    def backward(model: nn.Module) -> None:
        functional.cross_entropy(model(x), y).backward()
        BETWEEN.get(name, id)(model)

    found = []
    for _ in range(STEPS):
        layers = reference.take_step(model, optimizer, backward)
        for truth in layers.values():  # in the unit of the gradient that the optimizer used
            truth.G *= truth.gamma.norm() / (truth.G.T @ truth.features).norm()
        found.append({path: reference.measures(truth) for path, truth in layers.items()})
    return found


def reports(name: str) -> list[StepReport]:
    model, x, y = data()
    return trained(
        model,
        lambda model: functional.cross_entropy(model(x), y),
        STEPS,
        optimizer=OPTIMIZERS[name](list(model.parameters())),
        between=lambda step: BETWEEN.get(name, id)(model),
        max_rows=None,
    )


def compare(reading: LayerReading, expected: dict[str, float]) -> None:
    for name in COMPARED & expected.keys():
        assert getattr(reading, name) == pytest.approx(expected[name], **EXACT), name


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_measure_is_what_the_step_really_did(name: str) -> None:
    for report, truth in zip(reports(name), truths(name), strict=True):
        assert report.coverage == 1
        estimated = any("estimated from rows" in note for note in report.notes)
        assert estimated == (name == "clipping by value")
        for path, reading in report.layers.items():
            expected = truth[path]
            if estimated:  # the unit of an edited gradient is not defined
                del expected["effective_lr"], expected["descent"]
            compare(reading, expected)
            assert reading.standard_error == {}


def test_the_table_in_the_docs_has_all_of_them() -> None:
    table = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [name for name in OPTIMIZERS if not any(name in row for row in rows)] == []


def sam(model: nn.Module, base: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    """Take a step of sharpness-aware minimization as usually written: two passes, one step."""
    base.zero_grad()
    loss().backward()
    with torch.no_grad():
        parameters = list(model.parameters())
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        old = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.add_(0.05 * p.grad / norm)
    base.zero_grad()
    loss().backward()
    with torch.no_grad():
        for p, value in zip(parameters, old, strict=True):
            p.copy_(value)
    base.step()


def test_the_two_passes_of_sam_by_the_optimizer_inside() -> None:
    """The inner optimizer's gradient is that of the second pass, whose rows are measured."""
    model, x, y = data()
    base = sgd(model.parameters())
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        output.register_hook(lambda g: seen.append((args[0].detach(), g)))  # type: ignore[no-untyped-call]

    with Monitor(model, base, on_error="raise", max_rows=None) as monitor:
        handle = model[2].register_forward_hook(watched)
        sam(model, base, lambda: functional.cross_entropy(model(x), y))
        handle.remove()
    reading, (phi, G) = monitor.latest.layers["2"], seen[-1]
    assert (reading.rows_seen, reading.rows_total) == (8, 8)
    d = 0.1 * phi @ (phi.T @ G)
    assert reading.update_cosine == pytest.approx(cosine(d, G), **EXACT)
    assert reading.parameter_cosine == pytest.approx(1, **EXACT)


def test_several_optimizers_each_with_a_monitor() -> None:
    model, x, y = data()
    kinds = (partial(torch.optim.AdamW, lr=0.01), sgd)
    optimizers = [kind(model[i].parameters()) for kind, i in zip(kinds, (0, 2), strict=True)]
    monitors = [Monitor(model, o, max_rows=None, on_error="raise") for o in optimizers]
    for monitor in monitors:
        monitor.attach()
    functional.cross_entropy(model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
    for monitor in monitors:
        monitor.close()
    for monitor, path, name in zip(monitors, LAYERS, ("AdamW, foreach", "SGD"), strict=True):
        assert list(monitor.latest.layers) == [path]
        compare(monitor.latest.layers[path], truths(name)[0][path])


def test_an_optimizer_in_the_backward_pass() -> None:
    """Each parameter has its own optimizer, which steps as soon as the gradient is accumulated."""
    model, x, y = data()
    optimizers = {path: sgd(model.get_submodule(path).parameters()) for path in LAYERS}
    monitors = {
        p: Monitor(model, o, max_rows=None, on_error="raise") for p, o in optimizers.items()
    }
    for path, optimizer in optimizers.items():
        weight = model.get_parameter(f"{path}.weight")
        weight.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
    for monitor in monitors.values():
        monitor.attach()
    functional.cross_entropy(model(x), y).backward()
    for monitor in monitors.values():
        monitor.close()
    for path, monitor in monitors.items():
        compare(monitor.latest.layers[path], truths("SGD")[0][path])

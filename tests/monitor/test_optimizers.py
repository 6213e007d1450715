"""Optimizers with closures or unusual steps, and changes of the weights after the step.

Every test compares with a plain run of the same step, or with values computed by hand.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest
import torch
from cases import Around, loss_of
from setups import EXACT, cosine, mlp, plain_step, same, trained
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import LayerReading, Monitor
from adiv_monitor.report import StepReport


def closing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    """Return what an optimizer calls to have the gradient of a loss, and the loss."""

    def closure() -> Tensor:
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return closure


def test_a_closure_is_measured_and_lbfgs_refused() -> None:
    model, batch = mlp()
    closure = closing(model, batch)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        assert optimizer.step(closure) is not None
        optimizer.step(closure=closure)
    same(monitor.reports[0], plain_step())
    assert [len(report.layers) for report in monitor.reports] == [3, 3]

    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    with (
        pytest.warns(UserWarning, match="evaluated its closure"),
        Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor,
    ):
        optimizer.step(closure)
    assert not monitor.latest.layers
    assert "no single gradient belongs to its update" in monitor.latest.notes[0]
    assert len(monitor.latest.notes) == 1  # and none about weights moved before

    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, max_eval=1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        optimizer.step(closure)
    assert len(monitor.latest.layers) == 3


def test_without_an_optimizer_only_the_gradient_is_measured() -> None:
    (model, batch), expected = mlp(), plain_step()
    with Monitor(model, None, every_n_steps=2, on_error="raise") as monitor:
        for _ in range(3):
            model.zero_grad()
            loss_of(model, batch).backward()
            monitor.end_step()
    assert [report.step for report in monitor.reports] == [0, 2]
    for path, reading in monitor.reports[0].layers.items():
        assert reading.update_cosine is None
        assert reading.projection_cosine is None
        for name in ("gradient_cosine", "diagonal_cosine", "scale_cv", "interference_ratio"):
            value = getattr(expected.layers[path], name)
            assert getattr(reading, name) == pytest.approx(value, **EXACT)


Projection = Callable[[Tensor], Tensor]
PROJECTIONS: dict[str, Projection] = {
    "rows": lambda w: w / w.norm(dim=1, keepdim=True),
    "columns": lambda w: w / w.norm(dim=0, keepdim=True),
    "clipping": lambda w: w.clamp(-0.05, 0.05),
    "none": lambda w: w,
}


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_projections_after_the_step(projection: str, through_data: bool) -> None:
    """cos(a, u) and cos(a, −γ) agree if code rescales or clips the weights after each step."""
    model = nn.Linear(6, 4, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
    seen: list[Tensor] = []
    expected = []

    def look(step: int) -> None:
        seen[:] = model.weight.detach().clone(), model.weight.grad.clone()

    @torch.no_grad()
    def project(step: int) -> None:
        (before, gamma), weight = seen, model.weight
        u, projected = weight - before, PROJECTIONS[projection](weight.detach())
        if projection != "none" and through_data:
            weight.data = projected
        elif projection != "none":
            weight.copy_(projected)
        a = weight - before
        expected.append([cosine(a, u), cosine(a, -gamma), cosine(u, -gamma)])

    loss = lambda m: loss_of(m, batch)  # noqa: E731
    reports = trained(model, loss, 4, optimizer=optimizer, between=look, after=project)
    for report, values in zip(reports, expected, strict=True):
        reading = report.layers[""]
        found = [reading.projection_cosine, reading.applied_cosine, reading.parameter_cosine]
        assert found == pytest.approx(values, **EXACT)
        assert (values[0] < 0.999) == (projection != "none")


CHANGES: dict[str, Projection] = {
    "shorter": lambda w: 0.9 * w,
    "rows permuted": lambda w: w.flip(0),
    "entries permuted": lambda w: w.flip(1),
    "one entry": lambda w: w + 0.5 * (torch.arange(w.numel()) == 3).view(w.shape),
}


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("width", [6, 3000], ids=["small", "large"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_projection_that_begins_later_is_noticed(change: str, width: int) -> None:
    """The first report after it names the missing measure; the next one has it."""
    model, x = nn.Linear(width, 4).double(), torch.randn(8, width, dtype=torch.float64)

    def after(step: int) -> None:
        if step >= 2:
            model.weight.data = CHANGES[change](model.weight.data)

    reports = trained(model, lambda m: m(x).square().mean(), 5, after=after)
    readings: list[LayerReading] = [report.layers[""] for report in reports]
    assert readings[1].projection_cosine == 1
    assert readings[2].projection_cosine is None
    assert "the weights changed after it" in reports[2].notes[0]
    for reading in readings[3:]:
        assert reading.projection_cosine < 1 - 1e-12


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_an_embedding_that_keeps_its_rows_short(max_norm: float | None) -> None:
    """An embedding with max_norm renormalises rows at their look-up, which completes the step."""
    model = nn.Sequential(nn.Embedding(7, 3, max_norm=max_norm), nn.Linear(3, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = torch.arange(7)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens).square().sum().neg().backward()
            before = model[0].weight.detach().clone()
            optimizer.step()
            u = model[0].weight.detach() - before
        model(tokens)
        a = model[0].weight.detach() - before
    reading = monitor.reports[2].layers["0"]
    assert reading.projection_cosine == pytest.approx(cosine(a, u))
    assert (reading.projection_cosine < 0.99) == (max_norm is not None)


class Inner(torch.optim.Optimizer):
    """A base class that torch hooks, with a subclass whose step calls it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class Outer(Inner):
    """An optimizer that steps through its base class."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()


class Accelerated(torch.optim.Optimizer):
    """A wrapper like Accelerate's: an optimizer by type, but never initialised as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, object]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        self.optimizer.zero_grad()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


def around(model: nn.Module) -> dict[str, tuple[torch.optim.Optimizer, torch.optim.Optimizer]]:
    """Return optimizers whose step calls another one's, each as the loop has it and as given."""
    own = Outer(model.parameters())
    holding = Around(own)
    wrapper = Accelerated(Accelerated(torch.optim.SGD(model.parameters(), lr=0.1)))
    return {
        "of its base class": (own, own),
        "of one that it holds": (holding, holding),
        "that is held": (holding, own),
        "of a wrapper without hooks": (wrapper, wrapper),
    }


@pytest.mark.parametrize("name", around(nn.Linear(1, 1)))
def test_a_step_within_a_step_counts_once(name: str) -> None:
    model, batch = mlp()
    Inner(model.parameters())  # torch hooks a class's step at its first use
    optimizer, given = around(model)[name]
    with Monitor(model, given, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    assert [report.step for report in monitor.reports] == [0, 1, 2]
    same(monitor.reports[0], plain_step())


class Failing(Outer):
    """An optimizer whose first and third step raise after everything but the update."""

    count = 0

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.count += 1
        if self.count in (1, 3):
            raise RuntimeError("the optimizer's own error")
        super().step()


@pytest.mark.parametrize("with_closure", [[True, True], [False, False], [True, False]])
def test_a_step_that_raises_is_measured_when_it_is_taken(with_closure: list[bool]) -> None:
    model, batch = mlp()
    Inner(model.parameters())
    optimizer, closure = Failing(model.parameters()), closing(model, batch)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for raises in (True, False, True, False, False):
            closed = with_closure[0 if raises else 1]
            if not closed:
                closure()
            with pytest.raises(RuntimeError, match="own error") if raises else nullcontext():
                optimizer.step(closure) if closed else optimizer.step()
    assert [report.step for report in monitor.reports] == [0, 1, 2]
    same(monitor.reports[0], plain_step())


class Replacing(torch.optim.SGD):
    """An optimizer that discards `.grad` after its step."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        self.zero_grad()
        return loss


def test_an_optimizer_may_discard_grad_in_its_step() -> None:
    model, batch = mlp()
    own = Replacing(model.parameters(), lr=0.1)
    for report in trained(model, lambda m: loss_of(m, batch), 3, optimizer=own):
        assert report.layers["0"].parameter_cosine == pytest.approx(1, **EXACT)


class MovesFirst(torch.optim.Optimizer):
    """An optimizer that evaluates the gradient away from the step's start, as SAM does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(0.1)
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1).sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("widths", [(100, 100), (3, 9000)])
def test_an_optimizer_that_begins_to_change_large_gradients(widths: tuple[int, int]) -> None:
    """The optimizer's gradient is lost once; that step is measured from the rows."""
    torch.manual_seed(0)
    model, x = nn.Linear(*widths).double(), torch.randn(30, widths[0], dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[int] = []

    def change(*_: object) -> None:
        for parameter in model.parameters() if steps[-1] >= 2 else ():
            parameter.grad.mul_(0.1)

    optimizer.register_step_post_hook(change)
    loss = lambda m: m(x).square().mean()  # noqa: E731
    reports = trained(model, loss, 5, optimizer=optimizer, between=steps.append)
    lost = [any("changed .grad" in note for note in report.notes) for report in reports]
    assert lost == [False, False, True, False, False]
    for report, is_lost in zip(reports, lost, strict=True):
        reading = report.layers[""]
        of_gamma = (reading.parameter_cosine, reading.applied_cosine, reading.descent)
        assert [value is None for value in of_gamma] == [is_lost] * 3
        assert reading.update_cosine == pytest.approx(reading.gradient_cosine, rel=1e-9)


def test_an_optimizer_that_moves_the_weights_first_is_refused() -> None:
    model, batch = mlp()
    optimizer = MovesFirst(model.parameters())
    with Monitor(model, optimizer, on_error="raise") as monitor:
        optimizer.step(closing(model, batch))
    assert not monitor.latest.layers
    assert "as SAM does" in monitor.latest.notes[0]


@pytest.mark.slow
def test_a_compiled_optimizer_step() -> None:
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with Monitor(model, optimizer, every_n_steps=2, on_error="raise") as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            step()
    assert [report.step for report in monitor.reports] == [0, 2, 4]
    assert all(len(report.layers) == 3 for report in monitor.reports)


def evaluated(width: int, *, swaps: bool, clips: bool) -> list[StepReport]:
    """Train with an evaluation behind each step.

    Args:
        width: 300 makes the weight a large piece.
        swaps: averaged weights are swapped in for the evaluation, and back.
        clips: weights are clipped after each step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, width), nn.ReLU(), nn.Linear(width, 3))
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(16, 300), torch.arange(16) % 3

    def swap() -> None:
        for own, other in zip(model.parameters(), average.parameters(), strict=True):
            own.data, other.data = other.data, own.data

    @torch.no_grad()
    def evaluate(step: int) -> None:
        for parameter in model.parameters() if clips else ():
            parameter.clamp_(-0.03, 0.03)
        if swaps:
            swap()
        model.eval()(x)
        model.train()
        if swaps:
            swap()

    loss = lambda model: functional.cross_entropy(model(x), y)  # noqa: E731
    return trained(model, loss, 4, optimizer=optimizer, after=evaluate)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("width", [8, 300])
def test_weights_that_are_swapped_in_for_an_evaluation_are_no_applied_update(
    width: int, clips: bool
) -> None:
    plain = evaluated(width, swaps=False, clips=clips)
    swapped = evaluated(width, swaps=True, clips=clips)
    for one, other in zip(plain, swapped, strict=True):
        assert one.layers == other.layers and one.notes == other.notes

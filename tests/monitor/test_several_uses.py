"""Several uses of one parameter, repeated and replaced ones, calls without rows, and leaks."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from computes import Computes
from setups import EXACT, cosine, one_step
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor, StepReport
from adiv_monitor.report import REALISED_MEASURES

X = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3).sin()


class Tied(nn.Module):
    """An auto-encoder with one matrix, used directly and transposed; written in two ways."""

    def __init__(self, there: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.there = there
        self.weight = real(3, 3)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        z = self.there(x, self.weight)
        hidden = torch.tanh(z)
        y = hidden @ self.weight
        self.seen = [x, z, hidden.detach(), y]
        for output in (z, y):
            output.retain_grad()
        return y


@pytest.mark.parametrize("there", [functional.linear, partial(torch.einsum, "bi,ji->bj")])
def test_a_matrix_and_its_transpose_are_two_layers(there: Callable[..., Tensor]) -> None:
    torch.manual_seed(1)
    model = Tied(there)
    report = one_step(model, lambda m: (m(X) ** 3).sum().backward(), max_rows=None)
    there, back = report.layers.values()
    x, z, hidden_, y = model.seen
    gamma = model.weight.grad
    assert gamma is not None
    for reading, inputs, output, change in ((there, x, z, gamma.T), (back, hidden_, y, gamma)):
        assert reading.rows_total == 5
        assert reading.gradient_cosine == pytest.approx(
            cosine(inputs @ change, output.grad), **EXACT
        )


def test_an_input_that_layers_share_is_taken_anew_after_a_write() -> None:
    """Two layers have one input, which is written to between them."""
    two = {path: nn.Linear(3, 2, bias=False) for path in "ab"}
    model, x = Computes(lambda m, x: m.a(x) + m.b(x.mul_(2)), **two), X.float()
    with torch.autocast("cpu", torch.bfloat16):  # autograd saves copies, so that writes are allowed
        layers = one_step(model, lambda m: m(x.clone()).sum().backward(), max_rows=3).layers
    for measure in ("scale_mean", "scale_p50"):  # of all rows, of the sampled ones
        a, b = (getattr(layers[path], measure) for path in "ab")
        assert b == pytest.approx(4 * a)


def real(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


def bends(m: nn.Module, x: Tensor) -> Tensor:
    """Use a weight in a function without a rule."""
    return torch.atan2(x[:, None], m.weight).sum(1)


def both(m: nn.Module, x: Tensor) -> Tensor:
    """Use a weight, with a bias, in a function with a rule, too."""
    return bends(m, functional.linear(x, m.weight, m.bias))


def beside() -> nn.Module:
    """Return two modules that use one weight, the first with a rule, the second without."""
    linear = nn.Linear(3, 3)
    return nn.Sequential(linear, Computes(bends, weight=linear.weight))


def recurrent(m: nn.Module, x: Tensor) -> Tensor:
    """Use one of the weights of a recurrent layer once more."""
    hidden = m.rnn(x[:, None].sin())[0][:, 0]
    return torch.atan2(hidden[:, None], m.rnn.weight_ih_l0).sum(1)


SEVERAL: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "one module": (lambda: Computes(both, weight=real(3, 3), bias=real(3)), {""}),
    "beside each other": (beside, {"0"}),
    "recurrent": (
        lambda: Computes(recurrent, rnn=nn.RNN(3, 3, batch_first=True)),
        {"rnn.input_l0", "rnn.hidden_l0"},
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_of_uses_with_and_without_a_rule_the_former_are_measured(name: str) -> None:
    torch.manual_seed(1)
    build, measured = SEVERAL[name]
    report = one_step(build().double(), lambda m: m(X).square().sum().backward())
    assert report.layers.keys() == measured
    assert report.coverage == 1
    (note,) = report.notes
    assert "holds more than these rows" in note


NEAREST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no rule": torch.cdist,
    "two rules and none": lambda x, table: table.pow(2).sum(1) - 2 * x @ table.t(),
    "a rule": lambda x, table: -functional.linear(x, table),
    "an index": lambda x, table: (x[:, None] - table).abs().sum(-1).argsort(1).argsort(1),
}


@pytest.mark.parametrize("nearest", NEAREST)
def test_a_use_that_no_gradient_reaches_is_none(nearest: str) -> None:
    """A codebook: an entry is looked up by distances, through which no gradient flows."""

    def book(*, gradients: bool) -> tuple[StepReport, dict[str, float]]:
        def looked_up(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.set_grad_enabled(gradients):
                index = NEAREST[nearest](x, m.book).argmin(1)
            code = functional.embedding(index, m.book)
            return x + (code - x).detach(), functional.mse_loss(code, x.detach())

        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 3).double(), Computes(looked_up, book=real(6, 3)))

        def backward(model: nn.Module) -> None:
            y, loss = model(X)
            (y.square().sum() + loss).backward()

        report = one_step(model, backward, max_rows=None)
        assert report.coverage == 1 and not report.unsupported
        _, found = report.layers.values()
        assert found.kind == "embedding"
        return report, found.measures()

    report, found = book(gradients=True)
    assert not report.notes
    assert found == pytest.approx(book(gradients=False)[1], nan_ok=True)


def aside(m: nn.Module, x: Tensor) -> Tensor:
    """Store a value computed from a weight by a function without a rule."""
    m.kept = torch.cdist(x, m.weight).sum()
    return x * 2


def test_what_does_not_leave_a_module_is_not_measured_through_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3).double(), Computes(aside, weight=real(4, 3)))

    def backward(model: nn.Module) -> None:
        (model(X).sum() + model[1].kept).backward()

    report = one_step(model, backward)
    assert list(report.layers) == ["0"]
    (reason,) = report.unsupported.values()
    assert "no module that holds it returns" in reason


Function = Callable[[Tensor, Tensor], Tensor]
SAMPLES = torch.linspace(-3, 4, 5 * 6 * 4, dtype=torch.float64).reshape(5, 6, 4).sin()


class Repeats(nn.Module):
    """A function of its repeated weight (samples, inputs, outputs) and a batch."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3).cos())
        self.function = function
        self.shown: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        shown = self.w.expand(len(x), -1, -1)
        if shown.requires_grad:
            shown.retain_grad()
        self.shown.append(shown)
        return self.function(x, shown)


USES: dict[str, Function] = {
    "a product": torch.bmm,
    "from the left": lambda x, e: (e.mT @ x.mT).mT,
    "einsum": lambda x, e: torch.einsum("bik,bkj->bij", x, e),
    "a sum": lambda x, e: x[..., :3] + e.mean(1, keepdim=True),
    "nobody": lambda x, e: e * 1,
    "twice": lambda x, e: torch.bmm(x, e) + e.sin().sum(1, keepdim=True),
    "an elementwise product": lambda x, e: e * x[:, :4, :3],
    "written to data": lambda x, e: x[:, :4, :3].clone().add_(e),
    "a kernel": lambda x, e: functional.conv1d(x.mT, e.mT[0, :, :, None]),
}


@pytest.mark.parametrize("name", USES)
def test_a_repeated_row_is_an_offset_whatever_uses_it(name: str) -> None:
    """In a step of two micro-batches the descent is −⟨∂L/∂w, Δw⟩."""
    model = Repeats(USES[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    realised = lambda y: y.tanh().square().sum()  # noqa: E731
    with Monitor(model, optimizer, on_error="raise", realised=realised, max_rows=None) as monitor:
        for x in (SAMPLES, SAMPLES[:2].cos()):
            realised(model(x)).backward()
        before = model.w.detach().clone()
        optimizer.step()
        moved = before - model.w.detach()
        truth = (moved * model.w.grad).sum().item()
    report = monitor.latest
    assert (report.coverage, report.notes) == (1, ())
    (reading,) = report.layers.values()
    assert (reading.kind, reading.rows_total) == ("offset", 7 * 4)
    assert reading.descent == pytest.approx(truth)
    G = torch.cat([shown.grad for shown in model.shown[:2]])  # type: ignore[misc]
    active = G.abs().sum(-1) > 0
    d = moved.expand_as(G)
    assert reading.update_cosine == pytest.approx(cosine(d[active], G[active]))
    assert set(REALISED_MEASURES) <= reading.measures().keys()

"""Reports contain the losses that the loop collected, and collecting them changes nothing."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from example_reports import running
from setups import trained
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from adiv_monitor import Monitor, StepReport
from adiv_monitor.sinks import MemorySink

STEPS, EVERY = 10, 4
TARGETS = torch.arange(6) % 3


def batch(number: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(number))


class WithLoss(nn.Module):
    """A model whose forward returns the loss, computed by a submodule."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss(reduction=reduction)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits, "loss": self.criterion(logits, TARGETS)}


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(batch(0))["loss"]
    return loss


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


Source = Callable[[WithLoss], dict[str, Any]]
SOURCES: dict[str, Source] = {
    "said as a number": lambda model: {},
    "said as a tensor": lambda model: {},
    "module inside": lambda model: {"loss": model.criterion},
    "module outside": lambda model: {"loss": model.criterion, "part": model.net},
    "that of realised": lambda model: {"realised": model.criterion},
    "another than realised": lambda model: {
        "loss": model.criterion,
        "realised": lambda out: 2 * out["loss"],
    },
    "function": lambda model: {"loss": lambda out: out["loss"]},
    "function that computes": lambda model: {
        "loss": lambda out: functional.cross_entropy(out["logits"], TARGETS)
    },
    "function of realised": lambda model: {"realised": lambda out: out["loss"]},
}


def train(source: str | None, steps: Sequence[int] = range(STEPS), **options: Any) -> Any:
    """Train; return the losses that the loop collected, the reports and the final weights.

    Every step also evaluates, without gradients.
    """
    model = WithLoss()
    optimizer = optimizer_of(model)
    told = {} if source is None else SOURCES[source](model)
    part = told.pop("part", model)
    monitor = Monitor(
        part, optimizer, every_n_steps=EVERY, **{"on_error": "raise", **options}, **told
    )
    if source is None:
        monitor.close()
    else:
        monitor.attach()
    collected = []
    for number in steps:
        torch.manual_seed(number)
        loss = model(batch(number))["loss"]
        if source == "said as a number":
            monitor.log_loss(loss.item())
        elif source == "said as a tensor":
            monitor.log_loss(loss)
        with torch.no_grad():
            model(batch(number) * 9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        collected.append(loss.item())
    monitor.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return collected, list(monitor.reports), [p.detach() for p in model.parameters()]


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("source", SOURCES)
def test_losses_are_those_that_the_loop_collected(source: str) -> None:
    collected, reports, weights = train(source)
    assert [report.step for report in reports] == [0, 4, 8]
    assert [report.loss for report in reports] == pytest.approx([collected[i] for i in (0, 4, 8)])
    if "function" in source:  # the model is watched in measured steps only
        steps = [[0], [4], [8]]
    else:
        steps = [[0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert [list(report.losses) for report in reports] == steps
    for report in reports:
        assert report.losses == pytest.approx({i: collected[i] for i in report.losses})
    unmonitored, _, unmonitored_weights = train(None)
    assert collected == unmonitored
    assert all(map(torch.equal, weights, unmonitored_weights))


def one_step(monitor: Monitor, optimizer: Any, losses: Sequence[Tensor], say: bool = False) -> None:
    optimizer.zero_grad()
    for loss in losses:
        if say:
            monitor.log_loss(loss)
        loss.mean().backward()
    optimizer.step()


@pytest.mark.parametrize("source", ["said as a tensor", "module inside", "function"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_is_the_mean_over_micro_batches_and_samples(source: str, reduction: str) -> None:
    model = WithLoss(reduction)
    optimizer, collected = optimizer_of(model), []
    options = SOURCES[source](model)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise", **options) as monitor:
        for step in range(3):
            losses = [model(batch(2 * step + i))["loss"] for i in range(2)]
            one_step(monitor, optimizer, losses, say=source.startswith("said"))
            collected.append(torch.stack(losses).mean().item())
    found = [report.loss for report in monitor.reports]
    assert found == pytest.approx(collected)


def test_what_the_loop_says_goes_before_what_is_seen() -> None:
    model = WithLoss()
    optimizer = optimizer_of(model)
    with Monitor(model, optimizer, every_n_steps=2, loss=model.criterion) as monitor:
        for step in range(3):
            loss = model(batch(step))["loss"]
            if step < 2:
                monitor.log_loss(7.0 + step)
            one_step(monitor, optimizer, [loss])
    first, last = monitor.reports
    assert (first.losses, list(last.losses)) == ({0: 7.0}, [1, 2])
    assert (last.losses[1], last.losses[2]) == (8.0, pytest.approx(loss.item()))


def test_a_step_may_be_named() -> None:
    """A loop that knows the loss only after the step can name the step."""
    model = WithLoss()
    optimizer = optimizer_of(model)
    with Monitor(model, optimizer, every_n_steps=1) as monitor:
        for step in range(3):
            loss = model(batch(step))["loss"]
            one_step(monitor, optimizer, [loss])
            monitor.log_loss(10.0 + step, step=monitor.step - 1)
    assert [report.losses for report in monitor.reports] == [{0: 10.0}, {1: 11.0}, {2: 12.0}]


# Closures


@pytest.mark.parametrize("source", ["said as a tensor", "module inside", "function"])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_all_evaluations_of_a_closure_count(kind: Any, source: str) -> None:
    model = WithLoss().eval()
    optimizer = kind(model.parameters(), lr=0.1)
    options = SOURCES[source](model)
    evaluations: list[list[float]] = []
    with Monitor(model, optimizer, every_n_steps=1, **options) as monitor:
        for step in range(3):
            evaluations.append([])
            x = batch(step)

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x)["loss"]
                evaluations[-1].append(loss.item())
                if source.startswith("said"):
                    monitor.log_loss(loss)
                loss.backward()
                return loss

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*not measured: the optimizer evaluated")
                optimizer.step(closure)
    assert all(len(several) > 1 for several in evaluations) == (kind is torch.optim.LBFGS)
    found = [report.loss for report in monitor.reports]
    assert found == pytest.approx([sum(several) / len(several) for several in evaluations])


# Kept values


def test_a_loss_is_kept_as_it_was() -> None:
    """The loop may overwrite the loss and the tensors it was computed from."""
    model = WithLoss()
    optimizer = optimizer_of(model)
    with Monitor(model, optimizer, every_n_steps=1) as monitor:
        loss = model(batch(0))["loss"]
        total = loss.detach()
        monitor.log_loss(total)
        expected = total.item()
        total *= 100
        one_step(monitor, optimizer, [loss])
    assert monitor.latest.loss == pytest.approx(expected)


# Boundaries


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("1.5", TypeError, "got str, expected a number, or a tensor of real numbers"),
        (None, TypeError, "got NoneType"),
        (True, TypeError, "got bool"),
        ({"loss": 1.0}, TypeError, "got dict"),
        (torch.tensor(1j), TypeError, "got complex numbers"),
        (torch.ones(0), ValueError, "a tensor without elements"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, error: type[Exception], message: str) -> None:
    model = WithLoss()
    with (
        Monitor(model, optimizer_of(model)) as monitor,
        pytest.raises(error, match=f"the loss: got .*{message.removeprefix('got ')}"),
    ):
        monitor.log_loss(value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: "much", "TypeError: the loss: got str"),
        (lambda out: out["lost"], "KeyError: 'lost'"),
    ],
)
def test_what_a_loss_function_does_wrong_is_said_once(loss: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message) as seen:
        reports = trained(WithLoss(), loss_of, 3, loss=loss, on_error="warn")
    assert len(seen) == 1
    assert [report.losses for report in reports] == [{}, {}, {}]
    assert all(report.layers for report in reports)


def test_steps_without_an_optimizer_have_one() -> None:
    model = WithLoss()
    with Monitor(model, None, every_n_steps=2, loss=model.criterion) as monitor:
        collected = []
        for step in range(3):
            loss = model(batch(step))["loss"]
            loss.backward()
            collected.append(loss.item())
            monitor.end_step()
            model.zero_grad()
    assert [r.losses for r in monitor.reports] == [
        pytest.approx({0: collected[0]}),
        pytest.approx({1: collected[1], 2: collected[2]}),
    ]
    assert all(report.learning_rates == () for report in monitor.reports)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("say", [False, True])
def test_compiled_code_is_compiled_as_before(say: bool) -> None:
    """Code is compiled once, in one piece; measured steps, which run eagerly, see inside."""

    def run(monitored: bool) -> tuple[int, list[float], list[StepReport]]:
        torch._dynamo.reset()
        model = WithLoss().eval()
        optimizer, counter = optimizer_of(model), CompileCounter()
        monitor = Monitor(
            *(model, optimizer),
            every_n_steps=EVERY,
            loss=None if say else model.criterion,
            on_error="raise",
        )
        monitor.attach() if monitored else monitor.close()

        def forward(x: Tensor) -> Tensor:
            loss: Tensor = model(x)["loss"]
            if say:
                monitor.log_loss(loss)
            return loss

        compiled = torch.compile(forward, backend=counter, fullgraph=True)
        collected = []
        for step in range(STEPS):
            loss = compiled(batch(step))
            one_step(monitor, optimizer, [loss])
            collected.append(loss.item())
        monitor.close()
        return counter.frame_count, collected, list(monitor.reports)

    frames, collected, reports = run(monitored=True)
    assert [list(report.losses) for report in reports] == [[0], [4], [8]]
    assert [report.loss for report in reports] == pytest.approx(collected[::EVERY])
    assert run(monitored=False)[:2] == (frames, collected)
    assert frames == 1


# Learning rates


@pytest.mark.parametrize("layers_per_step", [None, 1])
def test_layers_are_in_parameter_groups_of_their_own(layers_per_step: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    first, last = ({"params": model[i].parameters()} for i in (0, 2))
    optimizer = torch.optim.SGD([first, {**last, "lr": 0.5}], lr=0.1)
    loss = lambda model: model(torch.randn(5, 4)).square().sum()  # noqa: E731
    reports = trained(model, loss, 2, optimizer=optimizer, layers_per_step=layers_per_step)
    assert {r.optimizer for r in reports} == {"SGD"}
    assert {p: g for r in reports for p, g in r.groups.items()} == {"0": 0, "2": 1}
    assert running(*reports).reports[-1].groups == {"0": 0, "2": 1}


@pytest.mark.parametrize("up", [False, True])
def test_a_report_says_whether_the_optimizer_maximizes(*, up: bool) -> None:
    model = WithLoss()
    several = [{"params": [p], "lr": 0.1, "maximize": True} for p in model.parameters()]
    several[0]["maximize"] = up
    (report,) = trained(model, loss_of, optimizer=torch.optim.SGD(several))
    assert report.maximize == up == StepReport.from_dict(report.to_dict()).maximize


def test_a_learning_rate_may_be_a_tensor_that_a_schedule_writes_to() -> None:
    model = WithLoss()
    lr = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, capturable=False, foreach=False)
    reports = trained(model, loss_of, 3, optimizer=optimizer, after=lambda step: lr.mul_(0.5))
    assert [r.learning_rates for r in reports] == [(0.5,), (0.25,), (0.125,)]


def test_sinks_get_the_losses_after_the_last_report() -> None:
    class Losses(MemorySink):
        later: dict[int, float]

        def add_losses(self, losses: Mapping[int, float]) -> None:
            self.later = dict(losses)

    model, sink = WithLoss(), Losses()
    optimizer = optimizer_of(model)
    with Monitor(model, optimizer, every_n_steps=5, sinks=[sink]) as monitor:
        for step in range(8):
            loss = model(batch(step))["loss"]
            monitor.log_loss(float(step))
            one_step(monitor, optimizer, [loss])
    assert [report.losses for report in sink.reports] == [
        {0: 0.0},
        {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0},
    ]
    assert sink.later == {6: 6.0, 7: 7.0}


@pytest.mark.parametrize(
    "given, said",
    [
        (nn.CrossEntropyLoss(), "the given CrossEntropyLoss was not seen"),
        (lambda output: 0.0 * output.detach().sum(), "<lambda> gave no value with a gradient"),
    ],
)
def test_the_first_report_says_what_to_pass_if_the_loss_is_not_seen(given: Any, said: str) -> None:
    model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
    optimizer = optimizer_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Monitor(model, optimizer, loss=given) as monitor:
            loss(model(batch(0)), TARGETS).backward()
            optimizer.step()
    (note,) = monitor.reports[0].notes
    assert said in note
    assert "Pass the module that the loop calls as `loss=`" in note
    assert "`monitor.log_loss(loss)`" in note

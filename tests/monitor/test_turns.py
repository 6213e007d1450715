"""Layers measured in turn: their readings equal those of steps that measure all layers."""

import copy
import math
from collections.abc import Callable
from typing import Any

import example_reports
import pytest
import setups
import torch
from setups import same
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from visible import visible
from zoo import ZOO, Specimen, Training, seed
from zoo.libraries import PEFT, TIMM

from adiv_monitor import Monitor, StepReport
from adiv_monitor.report import Turn

# One model of each kind: batch norm, windows, tied and fused weights, experts, recurrent maps,
# modules measured as a whole, weights made of several modules' parameters, several optimizers, no
# layer at all.
SPECIMENS = (
    *("mobilenet_v3_small", "vit", "gpt2", "llama", "mixtral", "t5", "whisper", "mamba"),
    "wav2vec2",
    *("lora", "eva02", "nfnet", "lstm", "lstm_tied", "transformer", "gan", "ten_times", "function"),
)


def first_steps(build: Callable[[], Any], turn: int, size: int | None) -> list[StepReport]:
    """Return the first step's reports, of one turn, or with all layers."""
    seed(7)
    training = build()
    monitors = []
    for each in training.trained:
        options: dict[str, Any] = {"max_rows": None, "on_error": "raise"}
        monitor = Monitor(each.model, each.optimizer, layers_per_step=size, **options)
        monitor.load_state_dict({**monitor.state_dict(), "turns": turn})
        monitor.attach()
        monitors.append(monitor)
    training.step()
    for monitor in monitors:
        monitor.close()
    reports = [monitor.reports[0] for monitor in monitors]
    assert all(report.step == 0 for report in reports)
    return reports


def training_of(specimen: Specimen) -> Training:
    seed(7)
    return specimen.build()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIMENS)
@pytest.mark.filterwarnings("ignore")  # warnings of libraries
def test_the_turns_of_a_round_say_what_one_step_says_of_all(name: str) -> None:
    for package, models in (("timm", TIMM), ("peft", PEFT)):
        if name in models:
            pytest.importorskip(package)
    specimen = ZOO[name]
    expected = first_steps(specimen.build, 0, None)
    held = [first_steps(specimen.build, 0, 1)[i].turn.of for i in range(len(expected))]
    size = max(1, math.ceil(max(held) / 3))
    parts = range(math.ceil(max(held) / size))
    rounds = [first_steps(specimen.build, turn, size) for turn in parts]
    for i, whole in enumerate(expected):
        turns = [reports[i] for reports in rounds]
        found = {path: reading for report in turns for path, reading in report.layers.items()}
        if max(held) == held[i]:  # one of several optimizers may have completed a round before
            assert sum(len(report.layers) for report in turns) == len(whole.layers)
        assert found.keys() == whole.layers.keys()
        for path, reading in whole.layers.items():
            for measure, value in reading.measures().items():
                close = pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True)
                assert getattr(found[path], measure) == close, f"{measure} of {path}"
        unmeasured = {n: count for report in turns for n, count in report.unmeasured.items()}
        assert unmeasured == whole.unmeasured
        unsupported = {n: why for report in turns for n, why in report.unsupported.items()}
        assert unsupported == whole.unsupported
        if max(held) == held[i]:
            elements = sum(report.turn.elements for report in turns)
            missing = sum((1 - report.coverage) * report.turn.elements for report in turns)
            assert missing == pytest.approx(sum(whole.unmeasured.values()), abs=1e-6)
            named = dict(training_of(specimen).trained[i].model.named_parameters())
            trained = {n: p.numel() for n, p in named.items() if p.requires_grad}
            assert elements == sum(trained.values())


class Several(nn.Module):
    """Layers made of one parameter, of several, and of ones moved between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.normed(torch.tanh(self.first(x))))
        x = nn.functional.linear(x, self.up.weight @ self.down.weight)
        y: Tensor = self.last(x)
        return y


def several() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Several().double(), torch.randn(5, 3, dtype=torch.float64)


def trained(steps: int, **options: Any) -> tuple[list[StepReport], list[Tensor]]:
    model, x = several()
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    reports = setups.trained(
        model, lambda model: model(x).square().sum(), steps, optimizer=own, **options
    )
    return reports, [p.detach() for p in model.parameters()]


def test_a_round_goes_through_the_modules_in_the_models_order_and_begins_anew() -> None:
    reports, _ = trained(5, layers_per_step=2)
    made = list(reports[1].layers)
    assert len(made) == 1  # of two parameters
    assert [list(report.layers) for report in reports] == [
        *(["first", "normed"], made, ["last"], ["first", "normed"], made)
    ]
    turns = [Turn(1, 2, 5, 40), Turn(3, 4, 5, 16), Turn(5, 5, 5, 10), Turn(1, 2, 5, 40)]
    assert [report.turn for report in reports[:4]] == turns
    assert all(report.coverage == 1 and not report.unmeasured for report in reports)
    assert all(not report.unsupported and not report.notes for report in reports)


def test_each_reading_of_a_run_is_that_of_the_run_with_all_layers() -> None:
    """Readings agree also where only one of the parameters that make a layer is due."""
    whole, weights = trained(6, max_rows=None)
    for size in (1, 2, 4):
        reports, own = trained(6, layers_per_step=size, max_rows=None)
        for report, expected in zip(reports, whole, strict=True):
            layers = {path: expected.layers[path] for path in report.layers}
            same(report, StepReport(report.step, layers, {}, 1.0))
        seen = {path for report in reports for path in report.layers}
        assert seen == whole[0].layers.keys()
        assert all(map(torch.equal, own, weights))


class Copies(TorchDispatchMode):
    """A mode that counts copied elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.clone:
            self.elements += made.numel()
        elif func.overloadpacket is torch.ops.aten._foreach_copy_:
            self.elements += sum(tensor.numel() for tensor in args[0])
        return made


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_than_the_due_parameters_are_copied(size: int) -> None:
    layers, width = 12, 128

    def copied(layers_per_step: int | None) -> int:
        torch.manual_seed(0)
        linear = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        model, x = nn.Sequential(*linear), torch.randn(4, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        monitor = Monitor(
            model, optimizer, every_n_steps=1, layers_per_step=layers_per_step, max_rows=1
        )
        with monitor:
            for _ in range(2):  # only the second knows what is possible
                optimizer.zero_grad()
                model(x).square().sum().backward()
                with visible(), Copies() as copies:
                    optimizer.step()
        return copies.elements

    assert copied(None) >= layers * width**2
    # For a layer not measured before: θ, γ, and the step's update.
    assert size * width**2 <= copied(size) <= 3 * size * width**2 + 1000 * size


def test_a_run_that_is_resumed_goes_on_with_its_round() -> None:
    reports, _ = trained(1, layers_per_step=2)
    model, x = several()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = Monitor(model, optimizer, every_n_steps=1, layers_per_step=2)
    with before:
        model(x).sum().backward()
        optimizer.step()
    assert before.latest.layers.keys() == reports[0].layers.keys()
    after = Monitor(model, optimizer, every_n_steps=1, layers_per_step=2)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    with after:
        model(x).sum().backward()
        optimizer.step()
    assert after.latest.turn.first == 3


def test_a_round_is_one_report_to_pictures_and_rules() -> None:
    with pytest.warns(UserWarning, match="scale_mean > 0"):
        reports, _ = trained(7, layers_per_step=2, alarms=["scale_mean > 0"])
    running = example_reports.running(*reports)
    turns = [Turn(1, 5, 5, 66), Turn(1, 5, 5, 66), Turn(1, 2, 5, 40)]
    assert [report.turn for report in running.reports] == turns
    assert running.count == 3
    whole = running.reports[0]
    assert whole.step == 2
    assert whole.layers.keys() == {path for report in reports[:3] for path in report.layers}
    assert whole.coverage == 1
    assert len(whole.alarms) == sum(len(report.alarms) for report in reports[:3])
    assert running.last.layers.keys() == reports[-1].layers.keys()


def test_a_weight_of_another_shape_has_changed() -> None:
    """Pruning between the step and the next forward pass costs no report."""
    model, x = nn.Linear(128, 256, bias=False), torch.randn(4, 128)

    def prune(step: int) -> None:
        if step == 2:
            model.weight.data = model.weight.data[:200].clone()
            model.weight.grad = None

    own = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = lambda model: model(x).square().sum()  # noqa: E731
    report = setups.trained(model, loss, 4, optimizer=own, after=prune)[2]
    assert report.layers[""].projection_cosine is None
    assert any("the weights changed after it" in note for note in report.notes)

"""After any failure training continues as without the monitor; the report names the failure."""

import copy
import gc
import math
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, Around, loss_of
from hooks import no_hooks
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn import functional
from torch.nn.modules.module import _global_forward_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from adiv_monitor import AdivError, Monitor, StepReport
from adiv_monitor.alignment import Probe
from adiv_monitor.features import DenseFeatures, Rows, register_features


def train(
    model: nn.Module,
    steps: list[tuple[Tensor, Tensor]],
    monitored: bool = True,
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] = loss_of,
    **options: object,
) -> list[StepReport]:
    """Train on the given steps with or without a monitor; assert that no hook remains."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every_n_steps=1, **options)
    monitor.attach() if monitored else monitor.close()
    try:
        for batch in steps:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    finally:
        monitor.close()
    assert no_hooks(model, optimizer)
    return list(monitor.reports)


def both(
    model: nn.Module, steps: list[tuple[Tensor, Tensor]], **options: object
) -> list[StepReport]:
    """Train with and without the monitor; the weights are bitwise equal, NaN included."""
    plain = copy.deepcopy(model)
    train(plain, steps, monitored=False, loss=options.get("loss", loss_of))
    reports = train(model, steps, **options)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(1234.0), b.nan_to_num(1234.0))
    return reports


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return CASES["mlp"].batches(count)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(factor: float) -> None:
    steps = batches(3)
    with pytest.warns(UserWarning, match="step 0: not finite .*: the gradient of Linear '4'"):
        reports = both(
            CASES["mlp"].model(), steps, loss=lambda m, b: loss_of(m, b) * factor, on_error="raise"
        )
    assert len(reports) == 3
    assert reports[0].notes == (
        "The gradient of '0', '2', '4' is not finite.",
        "The update of '0', '2', '4' is not finite.",
    )
    assert reports[0].layers["4"].non_finite == ("gradient", "update")
    assert reports[0].first_non_finite == ("gradient", "4")
    assert reports[1].first_non_finite == ("outputs", "0"), "the weights are not"
    assert math.isnan(reports[0].layers["0"].update_cosine)


def test_empty_batches_and_zero_gradients() -> None:
    empty = torch.zeros(0, 5, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    reports = both(
        CASES["mlp"].model(),
        [empty, *batches(1)],
        loss=lambda m, b: functional.cross_entropy(m(b[0]), b[1], reduction="sum"),
        on_error="raise",
    )
    assert reports[0].layers["0"].rows_total == 0
    assert math.isnan(reports[0].layers["0"].update_cosine)
    assert reports[1].layers["0"].rows_total == 3

    reports = both(
        CASES["mlp"].model(), batches(2), loss=lambda m, b: loss_of(m, b) * 0, on_error="raise"
    )
    reading = reports[1].layers["2"]
    assert reading.rows_without_gradient == reading.rows_seen == 3
    for name in ("update_cosine", "row_cosine_p50", "harmed_fraction", "projection_cosine"):
        assert math.isnan(getattr(reading, name)), name


@pytest.mark.parametrize("value", [1e15, 1e30, math.nan])
def test_a_batch_that_is_not_finite_costs_no_layer_and_no_warning(value: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    sound = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"every_n_steps": 1, "attainable": True, "on_error": "raise"}
    with warnings.catch_warnings(), Monitor(model, optimizer, **options) as monitor:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "adiv_monitor: step 1: not finite")
        for factor in (1.0, value, 1.0):
            optimizer.zero_grad()
            (factor * model(factor * torch.randn(4, 3)).square().sum()).backward()
            optimizer.step()
            model.load_state_dict(sound)
    assert [list(made.layers) for made in monitor.reports] == [["0", "1"]] * 3
    ceilings = [made.layers["0"].attainable_cosine for made in monitor.reports]
    assert ceilings[0] == ceilings[2] == pytest.approx(1.0)
    assert math.isfinite(value) or math.isnan(ceilings[1] or 0.0)


class Stubborn(nn.Linear):
    """A layer whose rule fails."""


@register_features(Stubborn)
def stubborn(module: Stubborn, rows: Rows, input: Tensor) -> DenseFeatures:
    raise RuntimeError("the rule's own error")


class Misdescribed(nn.Linear):
    """A layer whose rule disagrees with its forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@register_features(Misdescribed)
def misdescribed(module: Misdescribed, rows: Rows, input: Tensor) -> DenseFeatures:
    return DenseFeatures(rows.take(input)[:, None], rows.take(input).new_ones(rows.total, 1))


class Overriding(nn.Linear):
    """A subclass with its own forward, which is measured by the functions it calls."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Kept(nn.Linear):
    """A subclass that keeps its base's forward."""


def test_layers_that_cannot_be_measured_are_listed_once_and_left_alone() -> None:
    model = nn.Sequential(Kept(5, 4), Stubborn(4, 4), Misdescribed(4, 4), Overriding(4, 4)).double()
    with pytest.warns(UserWarning) as warned:
        reports = both(nn.Sequential(model), batches(3))
    said = sorted(str(w.message)[:25] for w in warned)
    assert said == ["adiv_monitor: layer '0.1'", "adiv_monitor: layer '0.2'"]
    for report in reports:
        assert report.layers.keys() == {"0.0", "0.3"}
        assert report.unsupported.keys() == {"0.1", "0.2"}
        assert "the rule's own error" in report.unsupported["0.1"]
        assert "relative error" in report.unsupported["0.2"]


def test_an_output_of_zeros_does_not_pass_for_a_checked_rule() -> None:
    """A wrong rule is detected only at the second step: at the first, all outputs are zero."""
    layer = Misdescribed(5, 3).double()
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    with pytest.warns(UserWarning, match="relative error"):
        reports = train(nn.Sequential(layer), batches(3))
    assert "0" in reports[0].layers
    assert "relative error" in reports[1].unsupported["0"]
    assert not reports[2].layers


PROBE = Probe(torch.ones(2, 5))
BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"every_n_steps": 0}, ValueError, "every_n_steps=….*got 0.*at least 1"),
    ({"max_rows": 0}, ValueError, "max_rows=….*got 0"),
    ({"max_rows": "all"}, ValueError, "'all'.*or None"),
    ({"keep": -1}, ValueError, "keep=….*got -1"),
    ({"seed": "a"}, ValueError, "seed=….*'a'.*at least 0"),
    ({"on_error": "pass"}, ValueError, "'pass'.*'warn' or 'raise'"),
    ({"layers": ["encoder.*"]}, ValueError, "encoder.*matches no module.*'0', '2', '4'"),
    ({"layers": "0"}, TypeError, r"expected a list: \['0'\]"),
    ({"layers": lambda path: True}, TypeError, r"expected a predicate \(path, module\)"),
    ({"sinks": [print]}, TypeError, r"write\(report\) and close\(\)"),
    ({"attainable": "no"}, TypeError, "attainable=….*'no', expected True or False"),
    ({"attention": 1}, TypeError, "attention=….*got 1, expected True or False"),
    ({"realised": nn.CrossEntropyLoss}, TypeError, r"expected an instance: CrossEntropyLoss\(\)"),
    ({"loss": nn.CrossEntropyLoss}, TypeError, r"loss=….*expected an instance"),
    ({"loss": nn.CosineSimilarity()}, TypeError, "which is high where a loss is low"),
    (
        {"loss": nn.functional.mse_loss},
        TypeError,
        r"loss=…\): got mse_loss, expected a function of the model's output alone",
    ),
    ({"realised": lambda output, y: 0.0}, TypeError, "got <lambda>, expected a function"),
    ({"loss": 3.0}, TypeError, "loss=….*got float"),
    ({"max_overhead": 1}, ValueError, "above 0 and below 1"),
    ({"model": nn.ReLU()}, ValueError, "ReLU without trainable parameters"),
    ({"model": len}, TypeError, "expected a torch.nn.Module"),
    ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))])}, ValueError, "that holds none"),
    ({"realised": True, "optimizer": None}, ValueError, "realised=….*got it with optimizer=None"),
    ({"realised": "loss"}, TypeError, "realised=….*got str, expected the module"),
    ({"realised": True, "layers_per_step": 2}, ValueError, "layers_per_step=2, expected one of"),
    ({"alignment": PROBE, "layers_per_step": 2}, ValueError, "alignment=….*expected one of the"),
    ({"alignment": torch.ones(2)}, TypeError, "expected an adiv_monitor"),
    *(
        ({"layers_per_step": wrong}, ValueError, "layers_per_step=….*integer of at least 1")
        for wrong in (0, -1, 1.5, True)
    ),
    *(
        ({"own_measures": wrong}, TypeError, r"^Monitor\(own_measures=…\): got .*, expected a dict")
        for wrong in (["a"], {"a": 1}, {"descent": len}, {"loss": len}, {1: len})
    ),
    ({"alarms": ["update_cosin < 0"]}, ValueError, "update_cosine"),
    ({"alarms": ["update_cosine < __import__('os')"]}, ValueError, "expected .LAYERS:. MEASURE"),
    ({"alarms": ["too-deep"]}, ValueError, "expected .LAYERS:. MEASURE"),
    ({"alarms": [3]}, TypeError, "a function"),
    ({"alarms": "update_cosine < 0"}, TypeError, "a list of rules"),
    ({"on_alarm": "stop"}, ValueError, "expected some: alarms='default'"),
    ({"alarms": "default", "on_alarm": "halt"}, ValueError, "'halt', expected 'warn' or 'stop'"),
    ({"optimizer": nn.ReLU()}, TypeError, "expected a torch.optim.Optimizer or None"),
    ({"optimizer": torch.optim.SGD.__new__(torch.optim.SGD)}, TypeError, "runs no step hooks"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_arguments_say_what_is_expected(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = CASES["mlp"].model()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=message):
        Monitor(**{"model": model, "optimizer": own, **options})


def test_a_monitor_is_used_once() -> None:
    model = CASES["mlp"].model()
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AdivError, match="expected an attached one with optimizer=None"):
        monitor.end_step()
    monitor.attach()
    with pytest.raises(AdivError, match="attached, expected a new one"):
        monitor.attach()
    with pytest.raises(AdivError, match="attached, expected a new one; call it before attach"):
        monitor.load_state_dict(monitor.state_dict())
    monitor.close()
    monitor.close()
    with pytest.raises(AdivError, match="closed, expected a new one; make another Monitor"):
        monitor.attach()


def test_only_every_nth_step_is_measured_and_nothing_is_attached_in_between() -> None:
    model = CASES["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every_n_steps=3, keep=2) as monitor:
        for step in range(8):
            assert no_hooks(model, None)
            loss_of(model, batches(1)[0]).backward()
            assert bool(_global_forward_hooks) == (step % 3 == 0)
            optimizer.step()
        saved = monitor.state_dict()
    assert [r.step for r in monitor.reports] == [3, 6]
    resumed = Monitor(model, optimizer, every_n_steps=3)
    resumed.load_state_dict(pickle.loads(pickle.dumps(saved)))
    with resumed:
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
    assert [r.step for r in resumed.reports] == [8]


@pytest.mark.parametrize("given", ["another optimizer", "none"])
def test_a_run_whose_steps_are_not_seen_is_told(given: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unused = torch.optim.SGD(model.parameters(), lr=0.1) if given == "another optimizer" else None
    told = r"no step of the monitor's optimizer, .*, so nothing was measured"
    with pytest.warns(UserWarning, match=told) as warned, Monitor(model, unused):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    with Monitor(model, optimizer, on_error="raise"):  # nothing ran, so nothing is reported
        pass


def test_memory_does_not_grow_and_nothing_stays_alive() -> None:
    """The number of live tensors does not rise over 45 measured steps."""
    model = CASES["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    activations: list[weakref.ref[Tensor]] = []
    model[0].register_forward_hook(lambda m, a, out: activations.append(weakref.ref(out)))
    (batch,), counts = batches(1), []
    gc.freeze()  # what others have left is not this run's
    with Monitor(model, optimizer, every_n_steps=1, keep=2, on_error="raise") as monitor:
        for step in range(45):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if step in (30, 37, 44):
                gc.collect()
                counts.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
    gc.collect()
    assert counts[0] == counts[1] == counts[2]
    assert len(activations) == 45
    assert not any(ref() is not None for ref in activations)
    assert len(monitor.reports) == 2


def test_hooks_in_a_graph_that_outlives_the_monitor_are_silent() -> None:
    model = CASES["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer, on_error="raise")
    monitor.attach()
    loss = loss_of(model, batches(1)[0])
    monitor.close()
    loss.backward()
    optimizer.step()
    assert monitor.latest is None
    assert no_hooks(model, optimizer)


def forgets_the_first(model: nn.Module, x: Tensor) -> None:
    """Train with a new optimizer over the same parameters."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(x).sum().backward()
        optimizer.step()


def test_steps_of_an_optimizer_that_took_over_are_told_once() -> None:
    """The switch is reported once and leaves no hook; the first one's next step is measured."""
    model = nn.Linear(3, 2)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 3)
    told = r"another optimizer \(AdamW.*\) than the monitor's \(SGD"
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        model(x).sum().backward()
        optimizer.step()
        with pytest.warns(UserWarning, match=told) as warned:
            forgets_the_first(model, x)
        assert len(warned) == 1
        assert not model._forward_hooks
        assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks
        forgets_the_first(model, x)  # a second warning would be an error
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
    assert [report.step for report in monitor.reports] == [0, 2]


def in_turn(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Step with another optimizer before each step."""
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).sum().backward()
        other.step()
        optimizer.step()


def in_alternation(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Alternate with another optimizer, which takes the first and the last step."""
    other = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(7):
        now = optimizer if step % 2 else other
        now.zero_grad()
        model(x).sum().backward()
        now.step()


class EveryThird(Around):
    """A wrapper that steps at every third call, as for gradient accumulation."""

    calls = 0

    def step(self, closure: object = None) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            self.inner.step()
            self.inner.zero_grad()


def every_third(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Call the wrapper three times for each step that moves the weights."""
    wrapper = EveryThird(optimizer)
    for _ in range(9):
        model(x).sum().backward()
        wrapper.step()


def on_a_part(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Also train some of the parameters with another optimizer, in passes of its own."""
    other = torch.optim.SGD([model.bias], lr=0.1)
    for _ in range(3):
        for now in (other, optimizer):
            now.zero_grad()
            model(x).sum().backward()
            now.step()


Loop = Callable[[nn.Linear, torch.optim.Optimizer, Tensor], None]
LOOPS: list[Loop] = [in_turn, in_alternation, every_third, on_a_part]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("given", ["inner", "outer"])
def test_no_other_optimizer_took_over(loop: Loop, given: str) -> None:
    """No warning is issued, and every step is measured."""
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = Around(inner)
    watched = inner if given == "inner" else outer
    with Monitor(model, watched, every_n_steps=1, on_error="raise") as monitor:
        loop(model, outer, torch.ones(1, 3))
    assert [report.step for report in monitor.reports] == [0, 1, 2]


def forgotten(steps: int, every_n_steps: int) -> list[weakref.ref[Any]]:
    """Train a model whose monitor is never closed, and return weak references to both."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every_n_steps=every_n_steps)
    monitor.attach()
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return [*map(weakref.ref, (model, optimizer, monitor))]


@pytest.mark.parametrize(("steps", "every_n_steps"), [(0, 50), (1, 50), (3, 1)])
def test_a_monitor_that_nobody_closes_goes_with_its_model(steps: int, every_n_steps: int) -> None:
    """Everything that the monitor set for the whole process is restored."""

    def state() -> tuple[object, ...]:
        hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
        return *hooks, sys.getrecursionlimit(), eval_frame._stance.stance

    gc.collect()
    before = state()
    left = forgotten(steps, every_n_steps)
    gc.collect()
    assert [reference() for reference in left] == [None] * 3
    assert state() == before

"""Loops with Accelerate and Fabric give a plain loop's readings, under the same names."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")
pytest.importorskip("lightning.fabric")
pytest.importorskip("pytorch_lightning")
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from lightning_setups import BATCHES, net
from plain_loops import plain_loop
from setups import same

from adiv_monitor import Monitor, StepReport

Pair = tuple[nn.Module, torch.optim.Optimizer]


def pair() -> Pair:
    model = net()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def watched(pair: Pair, train: Callable[[], None], every: int = 2) -> list[StepReport]:
    torch.manual_seed(2)
    with Monitor(*pair, every_n_steps=every, on_error="raise") as monitor:
        train()
    return list(monitor.reports)


def plain(accumulate: int = 1) -> list[StepReport]:
    model, optimizer = pair()
    torch.manual_seed(2)
    return plain_loop(model, optimizer, (loss_of(model, b) for b in BATCHES), accumulate)


def assert_same(ours: list[StepReport], expected: list[StepReport]) -> None:
    assert [report.step for report in ours] == [report.step for report in expected]
    for one, other in zip(ours, expected, strict=True):
        same(one, other, loosely=True)
        assert (one.coverage, one.unsupported, one.notes) == (1.0, {}, ())


class Loop(NamedTuple):
    """A library's loop around a model and an optimizer."""

    wrapped: Pair
    original: Pair
    train: Callable[[], None]

    def watched(self, given: str = "ww") -> list[StepReport]:
        """Return the model and the optimizer to monitor, each [w]rapped or [o]riginal."""
        model, optimizer = (self.wrapped if kind == "w" else self.original for kind in given)
        return watched((model[0], optimizer[1]), self.train)


GIVEN = ["ww", "oo", "wo", "ow"]


def train_with(
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[Tensor], object],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    for batch in BATCHES:
        with around():
            backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


# Accelerate


@pytest.fixture
def _fresh_accelerate() -> Iterator[None]:
    """Reset Accelerate's settings, which belong to the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerate(**options: Any) -> Loop:
    accelerator = Accelerator(cpu=True, **options)
    original = pair()
    model, optimizer = accelerator.prepare(*original)
    assert isinstance(optimizer, AcceleratedOptimizer)

    around = partial(accelerator.accumulate, model)
    train = partial(train_with, model, optimizer, accelerator.backward, around)
    return Loop((model, optimizer), original, train)


@pytest.mark.usefixtures("_fresh_accelerate")
def test_accelerate_with_accumulation() -> None:
    """Accelerate's optimizer is called after every batch, and steps after every second."""
    reports = accelerate(gradient_accumulation_steps=2).watched()
    assert [report.step for report in reports] == [0, 2]
    assert reports[0].layers["0"].rows_total == 12
    assert_same(reports, plain(accumulate=2))


@pytest.mark.usefixtures("_fresh_accelerate")
def test_steps_that_accelerate_skips_are_no_steps() -> None:
    """A first batch without a finite gradient is as if it had not existed."""
    Accelerator(cpu=True)
    model, inner = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    skipped = []

    def train(model: nn.Module, optimizer: Any, first: int, scale: Callable[..., Tensor]) -> None:
        for index, batch in enumerate(BATCHES[first:], start=first):
            torch.manual_seed(index)
            scale(loss_of(model, batch) * (torch.inf if index == 0 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(getattr(optimizer, "step_was_skipped", None))

    reports = watched((model, optimizer), lambda: train(model, optimizer, 0, scaler.scale))
    assert skipped == [True, *7 * [False]]
    other = pair()
    expected = watched(other, lambda: train(*other, 1, lambda loss: loss))
    assert [report.step for report in reports] == [0, 2, 4, 6]
    assert "zeroed before a step was taken" in reports[0].notes[0]
    for one, plain_one in zip(reports, expected, strict=True):
        same(one, plain_one, but=("gradient_factor",), loosely=True)


# Lightning Fabric


def fabric(compiled: bool = False, **options: Any) -> Loop:
    runner = Fabric(accelerator="cpu", devices=1, **options)
    net, inner = pair()
    original = torch.compile(net, backend="eager") if compiled else net, inner
    model, optimizer = runner.setup(*original)
    train = partial(train_with, model, optimizer, runner.backward)
    return Loop((model, optimizer), original, train)


# Dynamo itself reads `.grad` of tensors that it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_fabric_with_a_compiled_model() -> None:
    assert_same(fabric(compiled=True).watched(), plain())


# Both libraries


@pytest.mark.slow(one_in=3)
@pytest.mark.usefixtures("_fresh_accelerate")
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("make", [accelerate, fabric])
def test_readings_are_those_of_a_plain_loop(make: Callable[[], Loop], given: str) -> None:
    reports = make().watched(given)
    assert list(reports[0].layers) == ["0", "3"]
    assert_same(reports, plain())


WAYS = {
    "Accelerate": accelerate,
    "Accelerate, compiled": partial(accelerate, dynamo_backend="eager"),
    "Fabric": fabric,
    "Fabric, bfloat16": partial(fabric, precision="bf16-mixed"),
}


@pytest.mark.slow(one_in=2)
@pytest.mark.usefixtures("_fresh_accelerate")
@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_the_monitored_run_is_bit_identical(make: Callable[[], Loop]) -> None:
    monitored, alone = make(), make()
    assert all(report.coverage == 1 for report in monitored.watched())
    stream = torch.get_rng_state()
    torch.manual_seed(2)
    alone.train()
    assert torch.equal(torch.get_rng_state(), stream)
    weights = monitored.original[0].state_dict()
    assert all(torch.equal(weights[k], w) for k, w in alone.original[0].state_dict().items())

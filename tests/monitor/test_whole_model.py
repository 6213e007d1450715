"""What a report says about the whole model: what its optimizer trains in a step or not, and why."""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from computes import Computes
from setups import trained
from torch import Tensor, nn

from adiv_monitor import Monitor, StepReport

Loss = Callable[[nn.Module, Tensor], Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


SIZES = {"0": 35, "2": 24, "4": 15}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a plain forward pass."""
    loss: Tensor = model(x).square().sum()
    return loss


def train(
    model: nn.Module,
    held: Iterable[nn.Parameter],
    loss: Loss = squares,
    *,
    steps: int = 3,
    rate: float = 0.05,
    **options: Any,
) -> list[StepReport]:
    """Train these parameters by the loss of random batches, and return the reports."""
    chance = torch.Generator().manual_seed(1)

    def loss_of(model: nn.Module) -> Tensor:
        return loss(model, torch.randn(7, 6, generator=chance))

    optimizer = torch.optim.SGD(held, lr=rate)
    return trained(model, loss_of, steps, optimizer=optimizer, **options)


def of_head(model: nn.Module) -> Iterator[nn.Parameter]:
    return model.get_submodule("4").parameters()


# --- trainable and not_held ----------------------------------------------------------------------


def test_trainable_parameters_of_the_whole_model_are_counted() -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    assert [r.trainable for r in train(model, of_head(model))] == [69, 69, 69]


@pytest.mark.parametrize("options", [{}, {"layers": ["4"]}, {"layers_per_step": 1}])
def test_parameters_that_the_optimizer_does_not_hold_are_told(options: dict[str, Any]) -> None:
    model = network()
    first, *later = train(model, of_head(model), **options)
    assert first.not_held == {}
    assert [r.not_held for r in later] == [{"0": 35, "2": 24}] * 2
    assert StepReport.from_dict(later[0].to_dict()) == later[0]


class Unset(UserDict[str, int]):
    """Settings, one of which has no value yet, as of Hydra."""

    def __getitem__(self, key: str) -> int:
        raise LookupError(key)


def test_modules_in_a_plain_list_are_told() -> None:
    """Torch does not register them, so that the optimizer does not get their parameters."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = [nn.Linear(6, 5)], nn.Linear(5, 3)
            self.scale, self.seen = {"of": torch.ones(5, requires_grad=True)}, torch.zeros(5)
            self.settings = Unset(a=1)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.layers[0](x) * self.scale["of"]
            return self.head(self.seen)

    model = Listed()
    first, *later = train(model, model.parameters())
    hidden = {"layers[0].weight": 30, "layers[0].bias": 5, "scale['of']": 5}
    assert [r.not_held for r in (first, *later)] == [{}, hidden, hidden]
    assert later[-1].trainable == 18 + sum(hidden.values())


def _by_optimizer(parameters: list[nn.Parameter]) -> None:
    torch.optim.SGD(parameters, lr=0.1).step()


def _through_data(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.data.mul_(0.9)


@pytest.mark.parametrize("change", [_by_optimizer, _through_data])
def test_what_something_else_changes_is_not_told(
    change: Callable[[list[nn.Parameter]], None],
) -> None:
    model = network()
    others = [*model[0].parameters()]
    reports = train(model, of_head(model), after=lambda step: change(others))
    assert [r.not_held for r in reports] == [{}, {"2": 24}, {"2": 24}]


# --- removed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_removed_before_the_step_are_told(to_none: bool) -> None:
    model = network()

    def between(step: int) -> None:
        if step != 1:
            model.zero_grad(set_to_none=to_none)

    reports = train(model, model.parameters(), between=between)
    assert [r.removed for r in reports] == [SIZES, {}, SIZES]
    assert [r.cut_off for r in reports] == [{}] * 3
    reports = train(model, model.parameters(), lambda m, x: squares(m, 0 * x) * 0)
    assert [r.removed for r in reports] == [{}] * 3, "a gradient that is zero was not removed"


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("comes", [True, False])
def test_gradients_that_come_after_the_step_are_told(every: int, comes: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Monitor(model, optimizer, every_n_steps=every, on_error="raise") as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            loss = squares(model, torch.ones(7, 6))
            optimizer.step()
            if comes:
                loss.backward()
    assert [r.removed for r in monitor.reports] == [SIZES if comes else {}] * (4 // every)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# --- cut_off -------------------------------------------------------------------------------------


class Two(nn.Module):
    """A trunk and a head, with a layer beside the head that nothing uses.

    Args:
        way: how the trunk's output gets to the head.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.trunk = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        self.beside = nn.Linear(4, 2)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        self.idle = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad() if self.way == "no_grad" else nullcontext():
            h = self.trunk(x / 2)
        if self.way == "beside":
            self.beside(h)
        result: Tensor = self.head(h.detach() if self.way == "detach" else h)
        return result


def in_parts(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a trunk that runs by itself, without gradients."""
    with torch.no_grad():
        h = model.get_submodule("trunk")(x)
    return squares(model.get_submodule("head"), h)


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    """The loss; the same model is evaluated before and after its forward pass."""
    with torch.no_grad():
        model(x)
    loss = squares(model, x)
    with torch.no_grad():
        model(x)
    return loss


TRUNK = {"trunk.0": 35, "trunk.2": 24}


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize("options", [{}, {"layers_per_step": 2}, {"attention": True}])
@pytest.mark.parametrize(
    ("way", "loss"),
    [("no_grad", squares), ("detach", squares), ("detach", evaluated), ("", in_parts)],
)
def test_what_is_cut_off_from_the_loss_is_told(
    way: str, loss: Loss, options: dict[str, Any]
) -> None:
    model = Two(way)
    reports = train(model, model.parameters(), loss, steps=4, **options)
    assert [r.cut_off for r in reports] == [TRUNK] * 4


@pytest.mark.parametrize(
    ("way", "trains", "loss"),
    [
        ("", True, squares),
        ("beside", True, squares),
        ("beside", True, evaluated),
        ("detach", False, squares),
        ("no_grad", False, squares),
    ],
)
def test_what_is_unused_or_frozen_is_not_cut_off(way: str, trains: bool, loss: Loss) -> None:
    model = Two(way)
    model.trunk.requires_grad_(trains)
    reports = train(model, model.parameters(), loss)
    assert [r.cut_off for r in reports] == [{}] * 3


def less_teacher(m: nn.Module, x: Tensor) -> Tensor:
    """A teacher runs first, whose output is only compared with that of the student."""
    with torch.no_grad():
        target = m.teacher(x / 2)
    return m.student(x * target.mean()) - target


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_a_teacher_that_is_an_average_is_not_cut_off(*, moves: bool, through_data: bool) -> None:
    model = Computes(less_teacher, teacher=nn.Linear(6, 4), student=nn.Linear(6, 4))

    def average(step: int) -> None:
        pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
        for mean, p in pairs if moves else ():
            with torch.no_grad():
                (mean.data if through_data else mean).lerp_(p, 0.1)

    reports = train(model, model.parameters(), after=average, steps=4)
    assert [r.cut_off for r in reports[1:]] == [{} if moves else {"teacher": 28}] * 3


# --- frozen, and changed by others ---------------------------------------------------------------


def test_the_outermost_modules_that_are_frozen_are_told() -> None:
    model = nn.Sequential(network(), nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    reports = train(model, (p for p in model.parameters() if p.requires_grad))
    assert [r.frozen for r in reports] == [{"0": 74}] * 3


@pytest.mark.parametrize("shared", [True, False])
def test_another_optimizer_that_changes_the_same_weights_is_named(shared: bool) -> None:
    model, other = network(), network()
    second = torch.optim.RMSprop((model if shared else other).parameters(), lr=1e-3)
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    reports = train(model, model.parameters(), after=lambda step: second.step())
    assert [r.other_optimizers for r in reports] == [(), ("RMSprop",), ("RMSprop",)]
    assert [r.changed_by for r in reports] == [(), *[("RMSprop",) * shared] * 2]


# --- weights_returned ----------------------------------------------------------------------------


def set_back(model: nn.Module, every: int) -> Callable[[int], None]:
    """Return what sets the weights back to the first ones after every so many steps."""
    first = [p.detach().clone() for p in model.parameters()]

    def after(step: int) -> None:
        if step % every == every - 1:
            with torch.no_grad():
                for p, value in zip(model.parameters(), first, strict=True):
                    p.copy_(value)

    return after


def test_weights_that_are_set_back_have_returned() -> None:
    """If before every measured step, only what the steps do to them shows that they moved."""
    model = network()
    reports = train(model, model.parameters(), after=set_back(model, 4), steps=10)
    found = [r.weights_returned for r in reports]
    assert found[:2] == [None, None]
    assert [value for value in found[4::4] if value is not None] == [1.0, 1.0]
    again = {"after": set_back(model, 2), "steps": 8, "every_n_steps": 2}
    reports = train(model, model.parameters(), **again)
    assert [r.weights_returned for r in reports] == [None, None, 1.0, 1.0]
    still = train(model, model.parameters(), rate=0.0, steps=4)
    assert [r.weights_returned for r in still] == [None] * 4


def test_the_way_back_is_a_share_of_the_farthest_way() -> None:
    """The weights go along one direction to these places; all entries move alike."""
    places = [0.0, 1.0, 3.0, 8.0, 4.0, -2.0, 7.5]
    model = nn.Linear(6, 1, bias=False)
    given = iter(places[1:])

    def after(step: int) -> None:
        with torch.no_grad():
            model.weight.fill_(next(given, 0.0))

    nn.init.constant_(model.weight, places[0])
    reports = train(model, model.parameters(), after=after, steps=len(places), rate=0.0)
    expected = [
        max(
            1 - abs(now - start) / max(abs(then - start) for then in places[i + 1 : t])
            for i, start in enumerate(places[: t - 1])
        )
        for t, now in enumerate(places)
        if t > 1
    ]
    found = [r.weights_returned for r in reports[2:]]
    assert found == pytest.approx([min(max(x, 0.0), 1.0) for x in expected])


# --- the run itself ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_a_run_without_a_forward_pass_is_not_told() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer), torch.no_grad():
        model(torch.ones(2, 6))
    with pytest.raises(KeyError), Monitor(model, optimizer):
        squares(model, torch.ones(2, 6)).backward()
        raise KeyError
    unstepped = Monitor(model, None)
    unstepped.attach()
    squares(model, torch.ones(2, 6)).backward()
    unstepped.close()


def reports(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    change: Callable[[int], object],
    steps: int = 4,
) -> dict[int, StepReport]:
    """Train and return the reports; `change` is called just before the forward pass of a step."""
    numbers = count()

    def loss(model: nn.Module) -> Tensor:
        change(next(numbers))
        return model(torch.randn(7, 6)).square().sum()

    reports = trained(model, loss, steps, optimizer=optimizer)
    return {report.step: report for report in reports}


LATE = "became trainable after the step was prepared"


def test_a_layer_is_unfrozen() -> None:
    """The report of a step that was prepared before says that it lacks the layer."""
    model = network()
    model[0].requires_grad_(False)

    def unfreeze(step: int) -> None:
        if step == 2:
            model[0].requires_grad_(True)

    found = reports(model, torch.optim.SGD(model.parameters(), lr=0.1), unfreeze)
    assert [set(r.layers) for r in found.values()] == [{"2", "4"}] * 3 + [{"0", "2", "4"}]
    assert [any(LATE in note for note in r.notes) for r in found.values()] == [0, 0, 1, 0]
    assert [report.coverage == 1 for report in found.values()] == [1, 1, 0, 1]


def test_a_layer_is_frozen() -> None:
    model = network()

    def freeze(step: int) -> None:
        model[0].requires_grad_(step != 1)

    found = reports(model, torch.optim.SGD(model.parameters(), lr=0.1), freeze)
    expected = [{"0", "2", "4"}, {"2", "4"}, {"2", "4"}, {"0", "2", "4"}]
    assert [report.layers.keys() for report in found.values()] == expected
    assert [report.coverage == 1 for report in found.values()] == [1, 1, 0, 1]


def test_a_group_is_added_to_the_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)

    def add(step: int) -> None:
        if step == 1:
            optimizer.add_param_group({"params": list(model[0].parameters())})

    found = reports(model, optimizer, add, 3)
    assert [set(report.layers) for report in found.values()] == [{"4"}, {"4"}, {"0", "4"}]
    assert [any(LATE in note for note in r.notes) for r in found.values()] == [0, 1, 0]

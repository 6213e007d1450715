"""Models nested nearly as deep as Python's stack allows for modules with hooks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _has_any_global_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import _get_current_function_mode_stack

from adiv_monitor import Monitor

LIMIT = 1000  # Python's default
ROOM = 10  # modules whose frames the monitor's hooks need at the innermost one


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Scaled(Around):
    """A model with a parameter on every level, each pending until the next forward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.gain)


class Recursive(nn.Module):
    """A module that calls itself."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own = nn.Linear(3, 3)
        self.depth = depth

    def forward(self, x: Tensor, level: int = 0) -> Tensor:
        return self.own(x) if level == self.depth else self(x, level + 1)


def nested(kind: type[Around], depth: int) -> nn.Module:
    model: nn.Module = nn.Linear(3, 3)
    for _ in range(depth):
        model = kind(model)
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "around": lambda depth: nested(Around, depth),
    "scaled": lambda depth: nested(Scaled, depth),
    "recursive": Recursive,
}


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    outside = sys.getrecursionlimit()
    sys.setrecursionlimit(LIMIT)
    yield
    assert sys.getrecursionlimit() == LIMIT
    sys.setrecursionlimit(outside)


def train(name: str, depth: int, every: int | None) -> tuple[list[Tensor], Monitor | None]:
    torch.manual_seed(0)
    model = MODELS[name](depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = every and Monitor(model, optimizer, every_n_steps=every, on_error="raise")
    found = []
    with monitor or nullcontext():
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 3)).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
    return found + [p.detach() for p in model.parameters()], monitor


@cache
def deepest(name: str) -> int:
    """Return the greatest depth of a model that trains with empty hooks on all modules."""
    hooks = (
        register_module_forward_pre_hook(lambda *_: None),
        register_module_forward_hook(lambda *_: None),
    )
    least, most = 100, 600
    while least + 1 < most:
        depth = (least + most) // 2
        try:
            train(name, depth, None)
            least = depth
        except RecursionError:
            most = depth
    for hook in hooks:
        hook.remove()
    return least


@pytest.mark.slow(one_in=11)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_nearly_as_deep_as_hooks_allow_is_measured(name: str, every: int) -> None:
    # The frames below are as many as in `deepest`, except those of the search.
    for depth in (150, deepest(name) - ROOM):
        expected, _ = train(name, depth, None)
        found, monitor = train(name, depth, every)
        assert all(map(torch.equal, found, expected))
        assert [report.step for report in monitor.reports] == list(range(0, 4, every))
        assert all(report.coverage == 1.0 for report in monitor.reports)
        assert not any(report.notes for report in monitor.reports)


@pytest.mark.filterwarnings("ignore")  # of hooks that overflow it, too
def test_what_overflows_the_stack_leaves_nothing_behind() -> None:
    model = nested(Around, 230)
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.01))
    monitor.attach()
    with pytest.raises(RecursionError):
        model(torch.randn(2, 3))
    assert not _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    monitor.close()
    assert not _has_any_global_hook()  # type: ignore[no-untyped-call]

"""What a measured step takes grows with what it measures, and no faster: counted, not timed."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adiv_monitor import Monitor


class _Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(function: Callable[[], object]) -> tuple[int, int]:
    """How many functions it calls, Python's and C's, and how many operations on tensors."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    operations = _Operations()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    with operations:
        function()
    return calls, operations.count


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Whole(nn.Module):
    """Measured through its output, by functions of which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.special.expit(torch.logaddexp(self.scale, x))


class Repeated(nn.Module):
    """A weight that is shown to every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight.expand(len(x), -1, -1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "recurrent": Recurrent,
    "whole": lambda: nn.Sequential(nn.Linear(4, 4), Whole()),
    "repeated": Repeated,
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {}),
        ("linear", {"attainable": True}),
        ("linear", {"realised": True}),
        ("attention", {"attention": True}),
        ("recurrent", {}),
        ("whole", {}),
        ("repeated", {}),
    ],
    ids=str,
)
def test_micro_batches_cost_their_number(kind: str, options: dict[str, Any]) -> None:
    model = MODELS[kind]()
    # Of attention eight samples are looked at, in as many calls as have any of them.
    x = torch.randn(1 if kind == "attention" else 4, 5, 4)

    def step(micro_batches: int) -> tuple[int, int]:
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-6)

        def run() -> None:
            for _ in range(micro_batches):
                trained(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        settings: dict[str, Any] = {"every_n_steps": 1, "max_rows": None, "on_error": "raise"}
        with Monitor(trained, optimizer, **settings, **options):
            run()  # the first measured step keeps everything
            return counted(run)

    few, more, most = (step(count) for count in (8, 16, 32))
    for of_few, of_more, of_most in zip(few, more, most, strict=True):
        assert of_most - of_more <= 2.1 * (of_more - of_few)

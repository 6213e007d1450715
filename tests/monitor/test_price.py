"""The cost of a measured step is linear in what it measures: counted, not timed."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from computes import Computes
from setups import trained
from torch import Tensor, nn

from adiv_monitor import Monitor


def counted(function: Callable[[], object]) -> int:
    """Return the number of function calls, of Python and C; among them are torch's operators."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def whole(m: nn.Module, x: Tensor) -> Tensor:
    """A function without a rule, measured through its output."""
    return x * torch.special.expit(torch.logaddexp(m.scale, x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "whole": lambda: nn.Sequential(
        nn.Linear(4, 4), Computes(whole, scale=nn.Parameter(torch.ones(4)))
    ),
}


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {}),
        ("linear", {"attainable": True}),
        ("linear", {"realised": True}),
        ("attention", {"attention": True}),
        ("whole", {}),
    ],
    ids=str,
)
def test_micro_batches_cost_their_number(kind: str, options: dict[str, Any]) -> None:
    model = MODELS[kind]()
    # Attention samples eight samples, in as many calls as contain any of them.
    x = torch.randn(1 if kind == "attention" else 4, 5, 4)

    def step(micro_batches: int) -> int:
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-6)

        def run() -> None:
            for _ in range(micro_batches):
                trained(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        settings: dict[str, Any] = {"every_n_steps": 1, "max_rows": None, "on_error": "raise"}
        with Monitor(trained, optimizer, **settings, **options):
            run()  # the first measured step saves everything
            return counted(run)

    few, more, most = [step(count) for count in (8, 8, 16, 32)][1:]  # the first imports
    assert most - more <= 2.1 * (more - few)


class Scaled(nn.Module):
    """A module with many parameters of one element."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def tied(count: int) -> nn.Module:
    layers = [nn.Linear(4, 4) for _ in range(count)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*layers)


def tree(count: int) -> nn.Module:
    """Return a model of layers in modules of ten."""
    tens = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))) for _ in range(count // 10))
    return nn.Sequential(*tens)


SIZED: dict[str, Callable[[int], nn.Module]] = {
    "parameters of one module": Scaled,
    "layers": lambda count: nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))),
    "layers in modules": tree,
    "tied layers": tied,
    "modules measured as a whole": lambda count: nn.Sequential(
        *(MODELS["whole"]() for _ in range(count))
    ),
}


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize("kind", SIZED)
@pytest.mark.filterwarnings("ignore")
def test_layers_cost_their_number(kind: str, whole: bool) -> None:
    x = torch.randn(4, 4)

    def life(count: int) -> int:
        """Run a monitor's whole life with two measured steps."""
        model = SIZED[kind](count)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loss = lambda model: model(x).square().mean()  # noqa: E731
        return counted(lambda: trained(model, loss, 2, optimizer=optimizer))

    life(10)  # creates what is made once per process
    some = 60 if whole else 20
    few, many = life(some), life(2 * some)
    assert many <= 2.2 * few

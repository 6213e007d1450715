"""What is recomputed under checkpointing reads as without it: nothing is lost or doubled."""

from collections.abc import Callable

import pytest
import torch
from computes import Computes
from faults.scenarios import Odd
from setups import one_step, same
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from adiv_monitor import StepReport

X = torch.linspace(-2, 3, 60, dtype=torch.float64).view(5, 3, 4).sin()


def functions() -> nn.Module:
    """A layer that is not called, a parameter of its own, and a weight that is repeated."""

    def compute(m: nn.Module, x: Tensor) -> Tensor:
        x = functional.linear(x, m.layer.weight, m.layer.bias) + m.shift
        return torch.bmm(x, m.each.expand(len(x), -1, -1))

    own = {"shift": nn.Parameter(torch.randn(4)), "each": nn.Parameter(torch.randn(4, 4))}
    return Computes(compute, layer=nn.Linear(4, 4), **own)


def recurrent(rnn: nn.Module) -> nn.Module:
    """Return a module whose very output, which `backward` is called on, does not arrive."""
    return Computes(lambda m, x: 1 * m.rnn(x)[0], rnn=rnn)


# A module of four inputs and outputs, and how often it is called.
MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)), 1),
    "functions": (functions, 1),
    "weight norm": (lambda: weight_norm(nn.Linear(4, 4)), 10),
    "no rule": (Odd, 2),
    "lstm": (lambda: recurrent(nn.LSTM(4, 4, 2)), 1),
    "projected lstm": (lambda: recurrent(nn.LSTM(4, 6, 2, proj_size=4)), 1),
    "gru": (lambda: recurrent(nn.GRU(4, 4, 2)), 1),
}


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_it_reads_as_without_it(name: str, reentrant: bool) -> None:
    build, calls = MODULES[name]

    def report(*, kept: bool) -> StepReport:
        torch.manual_seed(3)

        def backward(model: nn.Module) -> None:
            first, inner, last = model
            x = first(X)
            for _ in range(calls):
                x = inner(x) if kept else checkpoint(inner, x, use_reentrant=reentrant)
                x = torch.tanh(x)
            last(x).square().sum().backward()

        model = nn.Sequential(nn.Linear(4, 4), build(), nn.Linear(4, 2)).double()
        return one_step(model, backward, max_rows=None)

    found, expected = report(kept=False), report(kept=True)
    same(found, expected)
    for path, reading in found.layers.items():
        rows = expected.layers[path].rows_total
        assert reading.rows_seen == reading.rows_total == rows
    assert (found.coverage, found.notes) == (1, expected.notes)

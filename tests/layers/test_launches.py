"""Kernels in a step, Triton's counted by the launcher, PyTorch's by the profiler; and its calls.

The kernels are not run, so no result is checked. Copies and views do not count as kernels.
"""

import cProfile
import pstats

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton", reason="without Triton there are no kernels")

from adiv_layers import (
    AffineLikeLinear,
    GradientOnlyConv2d,
    GradientOnlyLinear,
    L2Norm,
    NormLikeLinear,
    PatchNormConv2d,
)
from adiv_layers.kernels import choice, launch

# Operators that PyTorch runs as one kernel on a GPU; all others in a step create or view tensors.
BY_ONE_KERNEL = {
    *("aten::mm", "aten::addmm", "aten::sum", "aten::mul", "aten::mul_", "aten::add"),
    *("aten::rsqrt", "aten::clamp_min", "aten::addr"),
    *("aten::convolution", "aten::convolution_backward", "aten::tanh", "aten::tanh_backward"),
}
HALF = 0.5**0.5


@pytest.fixture
def started(monkeypatch):
    """Record the names of the Triton kernels that would be started."""
    names = []
    monkeypatch.setattr(
        launch._Starter, "_load", lambda self, *_: names.append(self.launch.kernel.__name__)
    )
    monkeypatch.setattr(launch, "_starters", {})
    monkeypatch.setattr(choice, "DEVICES", {"cpu"})
    return names


def counted(layer, x, started):
    """Return the number and the names of the kernels in forward and backward."""
    upstream = torch.ones_like(layer(x))
    started.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        output = layer(x)
        torch.autograd.backward(output, upstream, inputs=[x, *layer.parameters()])
    for parameter in [x, *layer.parameters()]:
        parameter.grad = None
    names = started + [e.name for e in profiler.events() if e.name in BY_ONE_KERNEL]
    return len(names), names


LINEAR = {  # (rows, n_in, n_out); a layer of torch starts 1 kernel forward, 3 backward
    "many rows": (4096, 1024, 1024),
    "fewer rows than inputs": (512, 1024, 1024),
    "narrow output": (512, 1024, 100),
}
CASES = [
    # unit rows, [W, b], product; γ and Σ f·g, its sum, two products, dx
    (AffineLikeLinear, {}, "many rows", 8),
    (AffineLikeLinear, {"alpha": 2.0, "beta": 0.3}, "many rows", 8),
    # unit rows, product, f·b added; the same backward
    (AffineLikeLinear, {}, "fewer rows than inputs", 8),
    # factor, product, scaling; gate, sum of the bias's, two products, dx corrected
    (AffineLikeLinear, {}, "narrow output", 8),
    # unit rows, product; sum of the bias's, two products, dx
    (NormLikeLinear, {}, "many rows", 6),
    # ... and β·b, β·Σ g
    (NormLikeLinear, {"alpha": HALF, "beta": HALF}, "many rows", 8),
    # product; two products, r²x, Σ r²g, its sum
    (GradientOnlyLinear, {}, "many rows", 6),
    # product; two products, r²x/2, Σ g, half of it
    (GradientOnlyLinear, {"form": "disproportional"}, "many rows", 6),
    (nn.Linear, {}, "many rows", 4),
]


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize(("kind", "settings", "shape", "expected"), CASES)
def test_linear(kind, settings, shape, expected, started):
    count, n_in, n_out = LINEAR[shape]
    x = torch.zeros(count, n_in, requires_grad=True)
    found, names = counted(kind(n_in, n_out, **settings), x, started)
    assert found == expected, names


@pytest.mark.parametrize(
    ("kind", "expected"), [(AffineLikeLinear, 7), (NormLikeLinear, 7), (nn.Linear, 12)]
)
def test_small_network(kind, expected, started):
    """Kernels of 3072-32-32-10 at 32 rows, no activations: ours 4 and 3, torch's 3 and 9."""
    layers = nn.Sequential(kind(3072, 32), kind(32, 32), kind(32, 10))
    x = torch.zeros(32, 3072, requires_grad=True)
    found, names = counted(layers, x, started)
    assert found == expected, names


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Σx², box, convolution, scaling; gate, sum of the bias's, convolution, boxᵀ, dx corrected
        (PatchNormConv2d, 9),
        # convolution; its two gradients, Σx², box, scaling, sum of the bias's
        (GradientOnlyConv2d, 7),
    ],
)
def test_convolutions(kind, expected, started):
    x = torch.zeros(8, 16, 14, 14, requires_grad=True)
    found, names = counted(kind(16, 16, 3, padding=1), x, started)
    assert found == expected, names


@pytest.mark.parametrize(
    ("kind", "most"), [(AffineLikeLinear, 130), (NormLikeLinear, 100), (GradientOnlyLinear, 110)]
)
def test_the_host_makes_few_calls(kind, most, started):
    """Calls of Python's and C's functions beyond those of `nn.Linear`: on a GPU they take longest.

    Counted with Python 3.11 and torch 2.15, without the calls in Triton's launcher.
    """
    x = torch.zeros(4096, 1024, requires_grad=True)

    def calls(layer):
        upstream = torch.ones_like(layer(x))
        leaves = [x, *layer.parameters()]
        profile = cProfile.Profile()
        for again in (False, True):
            profile.enable() if again else None
            torch.autograd.backward(layer(x), upstream, inputs=leaves)
        profile.disable()
        return pstats.Stats(profile).total_calls

    found = calls(kind(1024, 1024)) - calls(nn.Linear(1024, 1024))
    assert most / 2 < found <= most, found


def test_l2_norm(started):
    x = torch.zeros(64, 128, requires_grad=True)
    found, names = counted(L2Norm(), x, started)
    assert found == 2, names

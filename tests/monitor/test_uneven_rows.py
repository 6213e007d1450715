"""Rows whose gradients differ by large factors: a sample may miss the few with most of ‖G‖².

This happens when a loss depends on few samples. Statistics that one pass computes over all rows
stay exact for every kind of features, and the errors of the others hold.
"""

import copy
import math
import statistics
from collections.abc import Callable
from functools import cache

import pytest
import torch
from adiv_layers import AffineLikeLinear, GradientOnlyLinear, PatchNormConv2d
from computes import Computes
from setups import one_step
from torch import Tensor, nn

from adiv_monitor.report import LayerReading

SEEN, DRAWS = 64, 24
SIZES = (1.5, 3.5)  # standard deviation of the logarithm of row sizes


def of(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> nn.Module:
    """Return one function of the input and a parameter of this shape."""
    return Computes(lambda m, x: function(x, m.p), p=nn.Parameter(torch.randn(shape)))


def flat(columns: int = 6) -> Tensor:
    return torch.randn(600, columns) + 0.3


def images() -> Tensor:
    return torch.randn(6, 6, 10, 10) + 0.3


def frozen(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


def grouped(x: Tensor, p: Tensor) -> Tensor:
    return torch.einsum("bhi,hio->bho", x.unflatten(1, (2, 3)), p)


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
# Functions whose rows have one scale each.
ONE_SCALE: dict[str, Case] = {
    "linear": (lambda: nn.Linear(6, 5), flat),
    "one output": (lambda: nn.Linear(6, 1), flat),
    "embedding": (lambda: nn.Embedding(30, 5), lambda: torch.randint(30, (600,))),
    "einsum": (lambda: of(grouped, 2, 3, 4), flat),
    "convolution": (lambda: nn.Conv2d(6, 4, 3, padding=1), images),
    "affine-like": (lambda: AffineLikeLinear(6, 5), flat),
    "PatchNorm": (lambda: PatchNormConv2d(6, 4, 3), images),
}
# Functions whose rows have several.
SEVERAL: dict[str, Case] = {
    "grouped": (lambda: nn.Conv2d(6, 4, 3, padding=1, stride=2, groups=2), images),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, dilation=2, groups=6, bias=False), images),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), images),
    "layer norm": (lambda: nn.LayerNorm(6), flat),
    "RMS norm": (lambda: nn.RMSNorm(6), flat),
    "batch norm": (lambda: nn.BatchNorm1d(6), flat),
    "group norm": (lambda: nn.GroupNorm(2, 6), images),
    "gain": (lambda: of(torch.mul, 6), flat),
    "PReLU": (lambda: nn.PReLU(6), images),
}
# Functions whose scales are equal for all rows, which a sample shows.
EVEN: dict[str, Case] = {
    "offset": (lambda: of(torch.add, 6), flat),
    "bias alone": (lambda: frozen(nn.LayerNorm(6), "weight"), flat),
    "PatchNorm, grouped": (lambda: PatchNormConv2d(6, 4, 3, groups=2), images),
    "gradient-only": (lambda: GradientOnlyLinear(6, 5), flat),
}


KINDS = ONE_SCALE | SEVERAL


@cache
def uneven(kind: str, size: float) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, its input and ∂L/∂z."""
    torch.manual_seed(0)
    build, data = (KINDS | EVEN)[kind]
    model, x = build().double(), data()
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        shape = copy.deepcopy(model)(x).shape
    sizes = torch.exp(size * torch.randn(shape[0], 1, *shape[2:], dtype=torch.float64))
    return model, x, torch.randn(shape, dtype=torch.float64) * sizes


def measured(kind: str, size: float, max_rows: int | None, seed: int = 0) -> LayerReading:
    """Measure one step of plain gradient descent in two micro-batches."""
    model, x, g = uneven(kind, size)

    def backward(model: nn.Module) -> None:
        for part in (slice(len(x) // 3), slice(len(x) // 3, None)):
            (model(x[part]) * g[part]).sum().backward()

    report = one_step(copy.deepcopy(model), backward, max_rows=max_rows, seed=seed)
    (reading,) = report.layers.values()
    return reading


@cache
def truth(kind: str, size: float) -> LayerReading:
    """Compute the measures from every single row."""
    return measured(kind, size, None)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ONE_SCALE)
def test_one_pass_tells_what_the_scales_cost(kind: str, size: float) -> None:
    expected = truth(kind, size)
    found = measured(kind, size, SEEN)
    assert found.rows_seen < found.rows_total
    assert found.diagonal_cosine == pytest.approx(expected.diagonal_cosine, rel=1e-9)
    assert found.standard_error.get("diagonal_cosine", 0.0) < 1e-12  # rounding


@pytest.mark.parametrize("kind", EVEN)
def test_even_scales_cost_nothing_whatever_the_rows(kind: str) -> None:
    for seed in range(3):
        found = measured(kind, 3.5, SEEN, seed)
        assert found.diagonal_cosine == pytest.approx(1, rel=1e-9)
        assert found.standard_error.get("diagonal_cosine", 0.0) < 1e-6


@pytest.mark.slow(one_in=39, first=18)
@pytest.mark.parametrize(
    ("kind", "size"),
    # Not the embedding of which a few tokens have most of the step.
    [(k, s) for k in KINDS | EVEN for s in SIZES if s < 2 or k != "embedding"],
)
def test_errors_hold_of_rows_of_all_sizes(kind: str, size: float) -> None:
    """The errors of smooth sums over rows hold, up to a hundredth of the value."""
    expected = truth(kind, size).measures()
    beyond: list[str] = []
    sampled = 0
    for seed in range(DRAWS):
        found = measured(kind, size, SEEN, seed)
        for name, error in found.standard_error.items():
            if math.isnan(error) or name.endswith(("p05", "p50", "p95", "max")):
                continue
            sampled += 1
            off = abs(getattr(found, name) - expected[name])
            if off > 3 * error + 0.01 * abs(expected[name]):
                beyond.append(name)
    assert len(beyond) <= 0.04 * sampled, beyond


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("kind", ["layer norm", "batch norm", "depthwise"])
def test_a_sample_that_lacks_the_large_rows_knows_it(kind: str) -> None:
    """The lengths of all gradients show missing rows."""
    expected = truth(kind, 3.5).diagonal_cosine
    assert expected is not None
    beyond = 0
    for seed in range(DRAWS):
        found = measured(kind, 3.5, SEEN, seed)
        assert found.diagonal_cosine is not None
        error = found.standard_error["diagonal_cosine"]
        beyond += abs(found.diagonal_cosine - expected) > 3 * error
    assert beyond <= 0.1 * DRAWS  # by the sample's own spread alone, half of the draws


def test_outputs_of_long_rows_are_reckoned_with() -> None:
    """A sample lacks most of the few long rows, which hold the fourth powers of the outputs."""
    torch.manual_seed(0)
    model, x = nn.Linear(20, 32), torch.randn(1024, 20) * torch.randn(1024, 1).exp()
    g = torch.randn(1024, 32)

    def kurtosis(max_rows: int | None, seed: int = 0) -> tuple[float, float]:
        def backward(model: nn.Module) -> None:
            (model(x) * g).sum().backward()

        report = one_step(copy.deepcopy(model), backward, max_rows=max_rows, seed=seed)
        (reading,) = report.layers.values()
        assert reading.activation_kurtosis is not None
        return reading.activation_kurtosis, reading.standard_error.get("activation_kurtosis", 0.0)

    expected, _ = kurtosis(None)
    found = [kurtosis(128, seed) for seed in range(DRAWS)]
    assert statistics.median(error for _, error in found) < 0.5 * expected
    assert sum(abs(value - expected) > 3 * error for value, error in found) <= 0.15 * DRAWS

"""The theory's predictions for the corrected layers hold in monitored runs; float64."""

import copy
from collections.abc import Callable

import pytest
import torch
from adiv_layers import (
    AffineLikeLinear,
    GradientOnlyConv2d,
    GradientOnlyLinear,
    NormLikeLinear,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
)
from setups import one_step, trained
from torch import Tensor, nn

from adiv_monitor import StepReport

EXACT = {"rel": 1e-12, "abs": 1e-12}
HALF = 0.5**0.5
GEOMETRY = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
CIRCULAR = {**GEOMETRY, "padding_mode": "circular"}

LINEAR: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "affine-like": (lambda: AffineLikeLinear(6, 4), 1),
    "affine-like-no-bias": (lambda: AffineLikeLinear(6, 4, bias=False), 0),
    "affine-like-alpha-beta": (lambda: AffineLikeLinear(6, 4, alpha=-0.3, beta=2.0), 1),
    "norm-like": (lambda: NormLikeLinear(6, 4), 2),
    "norm-like-no-bias": (lambda: NormLikeLinear(6, 4, bias=False), 1),
    "norm-like-alpha-beta": (lambda: NormLikeLinear(6, 4, alpha=3.0, beta=HALF), 1),
    "proportional": (lambda: GradientOnlyLinear(6, 4), 1),
    "proportional-no-bias": (lambda: GradientOnlyLinear(6, 4, bias=False), 1),
    "disproportional": (lambda: GradientOnlyLinear(6, 4, form="disproportional"), 1),
}
IMAGES: dict[str, tuple[Callable[[], nn.Module], int, float]] = {
    "affine-like-1d": (lambda: PatchNormConv1d(4, 6, 3, **GEOMETRY), 1, 1),
    "affine-like-2d": (lambda: PatchNormConv2d(4, 6, 3, **CIRCULAR), 2, 1),
    "affine-like-3d": (lambda: PatchNormConv3d(4, 6, 2, padding="same"), 3, 1),
    "norm-like-2d": (lambda: PatchNormConv2d(4, 6, 3, form="norm-like", **GEOMETRY), 2, 2),
    "proportional-2d": (lambda: GradientOnlyConv2d(4, 6, 3, **GEOMETRY), 2, 1),
    "disproportional-2d": (
        lambda: GradientOnlyConv2d(4, 6, 3, form="disproportional", **CIRCULAR),
        2,
        1,
    ),
}


def measured(model: nn.Module, x: Tensor, **options: object) -> StepReport:
    loss = lambda model: (model(x) * torch.randn_like(model(x))).sum()  # noqa: E731
    return trained(model, loss, **options)[0]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_have_one_scale(name: str) -> None:
    """The scale is the same for all rows, however different their norms are."""
    build, scale = LINEAR[name]
    x = (
        torch.randn(50, 6, dtype=torch.float64)
        * torch.logspace(-2, 2, 50, dtype=torch.float64)[:, None]
    )
    report = measured(build().double(), x)
    assert not report.notes  # gradient-only layers weight their rows' gradients on purpose
    reading = report.layers[""]
    if scale:
        assert reading.scale_mean == pytest.approx(scale, **EXACT)
        assert reading.scale_cv == pytest.approx(0, abs=1e-12)
        assert reading.diagonal_cosine == pytest.approx(1, **EXACT)
    else:  # without a bias the affine-like form keeps ‖x‖²/(‖x‖² + 1)
        assert reading.scale_max < 1


@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_have_one_scale(name: str) -> None:
    build, dims, scale = IMAGES[name]
    x = torch.randn(3, 4, *[7] * dims, dtype=torch.float64) * torch.tensor([0.1, 1, 10.0]).reshape(
        3, *[1] * (dims + 1)
    )
    reading = measured(build().double(), x, max_rows=20).layers[""]
    assert reading.scale_mean == pytest.approx(scale, **EXACT)
    assert reading.scale_cv == pytest.approx(0, abs=1e-12)
    assert reading.diagonal_cosine == pytest.approx(1, **EXACT)


@pytest.mark.parametrize("name", LINEAR)
def test_a_single_row_really_moves_by_its_scale(name: str) -> None:
    """A step on a single row moves z by −η·scale·g, independently of the rule's formula."""
    build, scale = LINEAR[name]
    model, x = build().double(), 3 * torch.randn(1, 6, dtype=torch.float64)
    reading = measured(model, x).layers[""]
    assert reading.gradient_cosine == pytest.approx(1, **EXACT)
    assert reading.effective_lr == pytest.approx(0.1 * reading.scale_mean, **EXACT)
    if scale:
        assert reading.effective_lr == pytest.approx(0.1 * scale, **EXACT)


@pytest.mark.parametrize("rows", [5, 40], ids=["fewer-rows", "more-rows"])
def test_the_batch_form_reaches_the_ceiling(rows: int) -> None:
    """As λ → 0, a gradient step does the best that any ΔΘ can do."""
    torch.manual_seed(3)
    model = GradientOnlyLinear(6, 4, form="batch", damping=1e-9).double()
    x = torch.randn(rows, 6, dtype=torch.float64)
    reading = measured(model, x, attainable=True).layers[""]
    plain = nn.Linear(6, 4).double()
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(3)
    standard = measured(plain, x, attainable=True).layers[""]
    assert reading.gradient_cosine == pytest.approx(reading.attainable_cosine, rel=1e-6)
    assert standard.gradient_cosine < 0.99 * standard.attainable_cosine
    assert (reading.attainable_cosine == pytest.approx(1, rel=1e-9)) == (rows == 5)
    assert reading.scale_mean is None  # rows are mixed: M has no diagonal of single rows


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize("max_rows", [None, 64], ids=["all-rows", "sampled"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("form", ["proportional", "disproportional", "batch"])
def test_the_descent_of_a_gradient_only_layer_is_the_losses_own(
    form: str, momentum: float, max_rows: int | None
) -> None:
    """Its γ is not the gradient of the loss, so that −⟨γ, ΔΘ⟩ is not what the loss falls by."""
    torch.manual_seed(0)
    model = GradientOnlyLinear(5, 3, form=form).double()
    rows = 12 if max_rows is None else 512
    x = torch.randn(rows, 5, dtype=torch.float64) * torch.randn(rows, 1, dtype=torch.float64).exp()
    y = torch.randn(rows, 3, dtype=torch.float64) + 5
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=momentum)
    losses: list[Tensor] = []

    def loss(model: nn.Module) -> Tensor:
        losses.append((model(x) - y).square().mean())
        return losses[-1]

    *_, last = trained(model, loss, 3, optimizer=optimizer, max_rows=max_rows, seed=0)
    fallen = (losses[-1] - loss(model)).item()
    reading = last.layers[""]
    error = reading.standard_error.get("descent", 0.0)
    assert (error > 0) is (max_rows is not None)
    assert reading.descent == pytest.approx(fallen, rel=1e-4, abs=4 * error)


@pytest.mark.parametrize("kind", [GradientOnlyLinear, AffineLikeLinear, NormLikeLinear])
def test_accumulated_micro_batches_keep_the_gains_apart(kind: type[nn.Module]) -> None:
    """Concatenated rows of several calls keep their own gains and the scales of their biases."""
    layer = kind(6, 4).double()
    x = 5 * torch.randn(8, 6, dtype=torch.float64)
    target = torch.randn(8, 4, dtype=torch.float64)

    def read(*parts: slice) -> dict[str, float]:
        def backward(layer: nn.Module) -> None:
            for part in parts:
                (layer(x[part]) * target[part]).sum().backward()

        return one_step(copy.deepcopy(layer), backward).layers[""].measures()

    expected = read(slice(8))
    assert read(slice(3), slice(3, 8)) == pytest.approx(expected, rel=1e-10, abs=1e-12)

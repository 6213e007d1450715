"""Gradient-only layers: forward exactly torch's, backward as in a loop over rows."""

import pytest
import torch
import torch.nn.functional as F
from adiv_layers import GradientOnlyConv2d, GradientOnlyLinear
from adiv_layers.functional import gradient_only_conv, gradient_only_linear
from torch.autograd import gradgradcheck

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
FORMS = ["proportional", "disproportional", "batch"]


def by_rows(form, x, grad, has_bias, damping=1e-3):
    """Return the corrected gradients of weight and bias row by row; "batch" by an inverse."""
    if form == "batch":
        features = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) if has_bias else x
        gram = features @ features.T
        damped = gram + damping * gram.diagonal().mean() * torch.eye(len(x), dtype=x.dtype)
        theta = grad.T @ torch.linalg.inv(damped) @ features
        return theta[:, : x.shape[1]], theta[:, -1]
    weight = torch.zeros(grad.shape[1], x.shape[1], dtype=x.dtype)
    bias = torch.zeros(grad.shape[1], dtype=x.dtype)
    for row, g in zip(x, grad, strict=True):
        square = float(row @ row)
        if not has_bias:
            weight += torch.outer(g, row) / square
        elif form == "proportional":
            weight += torch.outer(g, row) / (square + 1)
            bias += g / (square + 1)
        else:
            weight += torch.outer(g, row) / (2 * square)
            bias += g / 2
    return weight, bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 5, 4), (3, 9, 2), (12, 2, 6), (1, 1, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_linear(form, shape, bias):
    rows, n_in, n_out = shape
    layer = GradientOnlyLinear(n_in, n_out, bias, form=form, dtype=torch.float64)
    x = torch.randn(rows, n_in, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(rows, n_out, dtype=torch.float64)
    output = layer(x)
    assert torch.equal(output, F.linear(x, layer.weight, layer.bias))
    output.backward(grad)
    weight, bias_gradient = by_rows(form, x.detach(), grad, bias)
    torch.testing.assert_close(layer.weight.grad, weight, **TIGHT)
    torch.testing.assert_close(x.grad, grad @ layer.weight, **TIGHT)
    if bias:
        torch.testing.assert_close(layer.bias.grad, bias_gradient, **TIGHT)


def test_damping_is_raised_to_what_rounding_allows():
    layer = GradientOnlyLinear(6, 3, form="batch", damping=1e-30)
    x, grad = torch.full((500, 6), 3.0), torch.randn(500, 3)
    layer(x).backward(grad)
    step = x @ layer.weight.grad.T + layer.bias.grad
    torch.testing.assert_close(step, grad.mean(0).expand(500, 3), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [3, 40])
def test_degenerate_rows_stay_finite(form, rows, dtype):
    layer = GradientOnlyLinear(6, 4, form=form, dtype=dtype)
    for x in (torch.zeros(rows, 6), torch.ones(rows, 6), torch.zeros(0, 6)):
        x = x.to(dtype)
        layer.zero_grad()
        layer(x.requires_grad_()).sum().backward()
        assert torch.isfinite(layer.weight.grad).all()
        assert torch.isfinite(layer.bias.grad).all()


def test_batch_form_lets_nan_through():
    layer = GradientOnlyLinear(3, 2, form="batch")
    layer(torch.full((5, 3), torch.nan)).sum().backward()
    assert layer.weight.grad.isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_backward_can_be_differentiated(form, bias):
    inputs = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 3), (2, 3), (2,))[: 2 + bias]
    ]
    assert gradgradcheck(lambda *inputs: gradient_only_linear(*inputs, form=form), inputs)


CONVOLUTIONS = [
    {"kernel_size": 3},
    {"kernel_size": 3, "padding": 1, "stride": 2, "groups": 2},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": "same", "dilation": 2, "groups": 4},
    {"kernel_size": (2, 3), "padding": "valid", "bias": False},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 2, "padding": "same", "padding_mode": "circular", "groups": 2},
]


# torch's own warning, for the twin as well: uneven padding may copy the input.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("form", ["proportional", "disproportional"])
def test_convolution(form, settings):
    layer = GradientOnlyConv2d(4, 8, **settings, form=form, dtype=torch.float64)
    twin = torch.nn.Conv2d(4, 8, **settings, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    torch.testing.assert_close(output, twin(x), **TIGHT)
    grad = torch.randn_like(output)
    (true,) = torch.autograd.grad(twin(x), x, grad)
    output.backward(grad)
    torch.testing.assert_close(x.grad, true, **TIGHT)
    weight, bias = convolution_by_patches(layer, form, x.detach(), grad)
    torch.testing.assert_close(layer.weight.grad, weight.view_as(layer.weight), **TIGHT)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, bias, **TIGHT)


def convolution_by_patches(layer, form, x, grad):
    """Return the row-by-row gradients per group, over patches cut out by `unfold`."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    gradients = []
    for inputs, outputs in zip(x.chunk(layer.groups, 1), grad.chunk(layer.groups, 1), strict=True):
        patches = F.unfold(inputs, layer.kernel_size, layer.dilation, 0, layer.stride)
        rows = patches.transpose(1, 2).flatten(0, 1)
        row_gradients = outputs.flatten(2).transpose(1, 2).flatten(0, 1)
        gradients.append(by_rows(form, rows, row_gradients, layer.bias is not None))
    weights, biases = zip(*gradients, strict=True)
    return torch.cat(weights), torch.cat(biases)


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize("form", ["proportional", "disproportional"])
def test_convolution_backward_can_be_differentiated(form, space):
    shapes = ((2, 2, *[3] * space), (2, 1, *[2] * space), (2,))
    inputs = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def call(x, weight, bias):
        return gradient_only_conv(x, weight, bias, padding=1, groups=2, form=form)

    assert gradgradcheck(call, inputs, fast_mode=space == 3)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["proportional", "disproportional"])
def test_empty_patches(form, bias):
    layer = GradientOnlyConv2d(2, 3, 2, bias=bias, form=form, dtype=torch.float64)
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    whole, grad = x[..., :3], torch.randn(2, 3, 4, 5, dtype=torch.float64)
    x[..., 3:] = 0
    layer(x).backward(grad)
    # Patches 0 to 2 contain data; the others may move only the bias.
    weight = layer.weight.grad.clone()
    layer.zero_grad()
    padded = torch.nn.functional.pad(whole, (0, 1))
    layer(padded).backward(grad[..., :3])
    torch.testing.assert_close(weight, layer.weight.grad, **TIGHT)
    half = GradientOnlyConv2d(2, 3, 2, bias=bias, form=form, dtype=torch.float16)
    half(x.half()).backward(grad.half())
    assert all(p.grad.isfinite().all() for p in half.parameters())
    torch.testing.assert_close(half.weight.grad.double(), weight, rtol=0.02, atol=0.02)


def test_convolution_of_one_image_and_of_none():
    layer = GradientOnlyConv2d(2, 3, 3)
    x = torch.randn(2, 6, 6)
    torch.testing.assert_close(layer(x), layer(x[None])[0])
    layer(torch.randn(0, 2, 6, 6)).sum().backward()
    assert not layer.weight.grad.any()


def test_frozen_parameters_and_inputs():
    for layer, shape in (
        (GradientOnlyLinear(4, 3), (2, 4)),
        (GradientOnlyConv2d(4, 3, 1), (2, 4, 2, 2)),
    ):
        layer.weight.requires_grad_(False)
        layer(torch.randn(shape)).sum().backward()
        assert layer.weight.grad is None
        assert layer.bias.grad is not None
        layer.bias.requires_grad_(False)
        x = torch.randn(shape, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("settings", [{"form": "batched"}, {"eps": 0.0}, {"damping": -1.0}])
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match="must be"):
        GradientOnlyLinear(2, 2, **settings)
    with pytest.raises(ValueError, match="must be"):
        GradientOnlyConv2d(2, 2, 1, form="batch")

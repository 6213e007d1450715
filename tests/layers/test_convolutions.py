"""PatchNorm convolutions agree with unfolded patches, as do their derivatives in float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from adiv_layers import PatchNormConv1d, PatchNormConv2d, PatchNormConv3d
from adiv_layers.functional import patch_norm_conv
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
LAYERS = {1: PatchNormConv1d, 2: PatchNormConv2d, 3: PatchNormConv3d}


def by_hand(layer, x):
    """Loop over samples, groups and output positions, cutting every patch out of the input."""
    space = len(layer.kernel_size)
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sizes = (0,) * space if layer.padding == "valid" else layer.padding
        sides = [(p, p) for p in sizes]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, [p for side in reversed(sides) for p in side], mode=mode)
    reach = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    out = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, layer.stride, strict=True)]
    z = torch.empty(x.shape[0], layer.out_channels, *out, dtype=x.dtype)
    c_in, c_out = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    for sample, group in itertools.product(range(x.shape[0]), range(layer.groups)):
        outputs = slice(group * c_out, (group + 1) * c_out)
        weight = layer.weight[outputs].flatten(1)
        bias = 0 if layer.bias is None else layer.bias[outputs]
        for position in itertools.product(*map(range, out)):
            window = [
                slice(i * s, i * s + r, d)
                for i, s, r, d in zip(position, layer.stride, reach, layer.dilation, strict=True)
            ]
            channels = slice(group * c_in, (group + 1) * c_in)
            patch = x[(sample, channels, *window)].flatten()
            z[(sample, outputs, *position)] = corrected(layer, weight @ patch, bias, patch)
    return z


def corrected(layer, projected, bias, patch):
    alpha, beta, square = layer.alpha, layer.beta, float(patch @ patch)
    if layer.form == "affine-like":
        return (alpha * projected + beta * bias) / math.sqrt(alpha**2 * square + beta**2)
    length = math.sqrt(square)
    divisor = length if abs(beta) == 1 else abs(alpha) * length / math.sqrt(1 - beta**2)
    return alpha * projected / divisor + beta * bias


SETTINGS = [
    {"kernel_size": 3},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 2, "padding": "valid", "groups": 2},
    {"kernel_size": 3, "padding": 2, "dilation": 2, "groups": 4, "stride": 2},
    {"kernel_size": 1, "bias": False},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect", "groups": 2},
    {"kernel_size": 3, "padding": 2, "padding_mode": "replicate", "stride": 2},
    {"kernel_size": 2, "padding": "same", "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 1, "alpha": -2.0, "beta": 0.5},
]


@pytest.mark.slow(one_in=6)
@pytest.mark.parametrize("form", ["affine-like", "norm-like"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("space", [1, 2, 3])
def test_every_patch_follows_the_formula(space, settings, form):
    layer = LAYERS[space](4, 8, **settings, form=form, dtype=torch.float64)
    x = torch.randn(2, 4, *[5, 6, 4][:space], dtype=torch.float64)
    expected = by_hand(layer, x)
    torch.testing.assert_close(layer(x), expected, **TIGHT)
    torch.testing.assert_close(layer(x[0]), expected[0], **TIGHT)


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("form", ["affine-like", "norm-like"])
@pytest.mark.parametrize("space", [1, 2, 3])
def test_first_and_second_derivatives(space, form, groups):
    x = torch.randn(2, 2, *[3] * space, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2 // groups, *[2] * space, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(x, weight, bias):
        return patch_norm_conv(x, weight, bias, padding=1, groups=groups, form=form)

    fast = space == 3
    assert gradcheck(call, (x, weight, bias), fast_mode=fast)
    assert gradgradcheck(call, (x, weight, bias), fast_mode=fast)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["affine-like", "norm-like"])
def test_empty_patches_give_the_bias_and_finite_gradients(form, dtype):
    layer = PatchNormConv2d(2, 3, 3, padding=1, form=form, dtype=dtype)
    x = torch.randn(1, 2, 6, 6, dtype=dtype)
    x[..., 3:] = 0
    x.requires_grad_()
    output = layer(x)
    assert torch.equal(output[0, :, :, 5], layer.bias[:, None].expand(3, 6))
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.isfinite(first).all()
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("form", ["affine-like", "norm-like"])
def test_empty_batch_and_strided_input(form):
    layer = PatchNormConv2d(3, 4, 3, groups=1, padding=1, form=form, dtype=torch.float64)
    assert layer(torch.randn(0, 3, 5, 5, dtype=torch.float64)).shape == (0, 4, 5, 5)
    x = torch.randn(2, 5, 5, 3, dtype=torch.float64).movedim(-1, 1)
    torch.testing.assert_close(layer(x), layer(x.contiguous()), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_squares_in_float32(dtype):
    x = torch.full((1, 256, 6, 6), 300.0, dtype=dtype)  # 300² overflows fp16
    layer = PatchNormConv2d(256, 1, 4, bias=False, form="norm-like", dtype=dtype)
    nn.init.constant_(layer.weight, 2**-10)
    expected = torch.full((1, 1, 3, 3), 4096 * 2**-10 / 64)
    torch.testing.assert_close(layer(x).float(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "settings", [{"form": "norm"}, {"beta": 0.0}, {"form": "norm-like", "beta": 2.0}]
)
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match="must be"):
        PatchNormConv2d(1, 1, 3, **settings)

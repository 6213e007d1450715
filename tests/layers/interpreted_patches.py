"""Kernels over patches agree with unfolded patches in float64."""

import pytest
import torch
from adiv_layers.functional import patch_norm_conv
from adiv_layers.kernels import functions, launch
from interpreted import DTYPES, FLOAT64, check, poisoned

# By name, α and β.
FORMS = [("affine-like", 1, 1), ("norm-like", 1, 1)]
EXTREMES = [("affine-like", -2, 0.5), ("affine-like", 1, 1e-3), ("affine-like", 1e-2, 1)]
EXTREMES += [("norm-like", 3, -0.9), ("norm-like", 1, 0), ("norm-like", -2, 1)]


def divisors(form, squares):
    """Return the factors of Wx and of b in a form, as in the paper."""
    name, alpha, beta = form
    if name == "affine-like":
        s = (alpha**2 * squares + beta**2).sqrt()
        return alpha / s, beta / s
    squares = squares.clamp_min(1e-24)
    s = squares.sqrt() if abs(beta) == 1 else (alpha**2 * squares / (1 - beta**2)).sqrt()
    return alpha / s, torch.full_like(s, beta)


def unfolded(x, kernel, stride, padding, dilation):
    """Return (batch, channels, *space_out, taps)."""
    x = torch.nn.functional.pad(x, [p for side in reversed(padding) for p in (side, side)])
    for d, (taps, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(d, (taps - 1) * gap + 1, step)[..., ::gap]
    return x.flatten(2 + len(kernel))


def reference(stride, padding, dilation, groups, form):
    def call(x, weight, bias):
        patches = unfolded(x, weight.shape[2:], stride, padding, dilation).movedim(-1, 2)
        space = patches.shape[3:]
        patches = patches.reshape(len(x), groups, -1, *space)  # one patch per group
        w = weight.reshape(groups, weight.shape[0] // groups, -1)
        b = bias.view(1, groups, -1, *[1] * len(space))
        y = torch.einsum("gof,bgf...->bgo...", w, patches)
        first, second = divisors(form, patches.square().sum(2, keepdim=True))
        return (first * y + second * b).flatten(1, 2)

    return call


def patch_norm(stride, padding, dilation, groups, form):
    name, alpha, beta = form

    def call(x, weight, bias):
        settings = {"form": name, "alpha": alpha, "beta": beta}
        return patch_norm_conv(x, weight, bias, stride, padding, dilation, groups, **settings)

    return call


CASES = {  # (input, weight, stride, padding, dilation, groups)
    "1d": ((2, 5, 17), (3, 5, 3), (1,), (1,), (1,), 1),
    "1d strided": ((3, 3, 19), (7, 3, 4), (3,), (2,), (1,), 1),
    "2d": ((2, 6, 9, 8), (5, 6, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "2d mixed": ((2, 4, 9, 11), (4, 4, 2, 3), (2, 3), (0, 4), (2, 1), 1),
    "2d gap": ((2, 3, 8, 8), (4, 3, 1, 1), (3, 3), (0, 0), (1, 1), 1),
    "2d groups": ((2, 16, 7, 7), (24, 8, 3, 3), (2, 2), (1, 1), (1, 1), 2),
    "2d one": ((1, 2, 1, 1), (2, 2, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "3d": ((2, 3, 5, 4, 6), (4, 3, 2, 3, 2), (2, 2, 1), (1, 0, 1), (1, 1, 2), 1),
}


def tensors(case):
    x, weight, stride, padding, dilation, groups = CASES[case]
    tensors = [torch.randn(x) + 0.1, torch.randn(weight) / 3, torch.randn(weight[0])]
    return tensors, (stride, padding, dilation, groups)


def channels_last(x):
    return x.to(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()])


@pytest.mark.slow(one_in=97)
@pytest.mark.parametrize("form", FORMS + EXTREMES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_patch_norm(case, form, dtype, monkeypatch):
    inputs, settings = tensors(case)
    truth = reference(*settings, form)
    # In fp16 the norm-like factor of a zero patch is up to 16384·α, times a gradient below 65504.
    upstream = [torch.randn_like(truth(*inputs)) / 4]
    with poisoned(monkeypatch):
        check(patch_norm(*settings, form), truth, inputs, upstream, dtype)


@pytest.mark.slow(one_in=19)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["2d", "2d mixed", "2d groups", "3d"])
@pytest.mark.parametrize("layout", ["channels last", "mixed", "sliced", "expanded"])
def test_layouts(case, form, layout):
    inputs, settings = tensors(case)
    truth = reference(*settings, form)
    x, g = inputs[0].double(), torch.randn_like(truth(*inputs)).double()
    if layout in ("channels last", "mixed"):
        x = channels_last(x)
        g = channels_last(g) if layout == "channels last" else g
    elif layout == "sliced":
        x, g = x.repeat_interleave(2, -1)[..., ::2], g.repeat_interleave(3, 1)[:, 1::3]
    else:
        g = torch.ones((), dtype=FLOAT64).expand_as(g)
    inputs = [x, *(t.double() for t in inputs[1:])]
    check(patch_norm(*settings, form), truth, inputs, [g], FLOAT64)


@pytest.mark.parametrize("form", FORMS)
def test_the_kernels_are_used_and_the_layout_kept(form):
    inputs, settings = tensors("2d")
    x = channels_last(inputs[0]).requires_grad_()
    z = patch_norm(*settings, form)(x, *inputs[1:])
    assert isinstance(z.grad_fn, functions.OutputScaled._backward_cls)
    z.relu_().sum().backward()  # overwrites the output, which is no view


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("last", [False, True])
def test_many_tiles_and_many_programs(form, last, monkeypatch):
    monkeypatch.setattr(launch, "_TILE", 32)
    monkeypatch.setattr(launch, "_ACROSS", 8)
    monkeypatch.setattr(launch, "_ALONG", 8)
    inputs, settings = tensors("2d groups")
    inputs[0] = channels_last(inputs[0]) if last else inputs[0]
    truth = reference(*settings, form)
    upstream = [torch.randn_like(truth(*inputs))]
    check(patch_norm(*settings, form), truth, inputs, upstream, FLOAT64)


def test_zero_patches():
    x = torch.zeros(1, 2, 6, dtype=FLOAT64)
    x[..., 0] = 1.0
    x.requires_grad_()
    weight, bias = torch.randn(3, 2, 2, dtype=FLOAT64), torch.randn(3, dtype=FLOAT64)
    z = patch_norm((2,), (0,), (1,), 1, FORMS[1])(x, weight, bias)
    assert torch.equal(z[0, :, 1], bias)  # W·0·r + b
    (dx,) = torch.autograd.grad(z.sum(), x)
    assert dx.isfinite().all()

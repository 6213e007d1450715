"""Kernels on tensors with parts 2³¹ and more elements apart, beyond 32-bit offsets."""

import pytest
import torch
from adiv_layers.forms import affine_like
from adiv_layers.kernels import channels, rows, small
from interpreted import BFLOAT16, far_apart, relative_error

UNIT = affine_like(1.0, 1.0)
FAR = (2**31, 2**32, 2**31 + 8)
LAYOUTS = {  # of (images, channels, positions); `far` is a stride in FAR
    "images, channels last": ((2, 8, 16), lambda far: (far, 1, 8)),
    "images, contiguous": ((2, 8, 16), lambda far: (far, 16, 1)),
    "positions, channels last": ((1, 8, 3), lambda far: (0, 1, far)),
    "channels, contiguous": ((1, 3, 16), lambda far: (0, far, 1)),
}


def close(found, expected):
    assert relative_error(found, expected) <= 1e-2  # bfloat16; a wrong position would be off by 1


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_channels(layout, far):
    shape, strides = LAYOUTS[layout]
    near = torch.randn(shape).to(BFLOAT16)
    x = far_apart(near, strides(far))
    factor = torch.rand(shape[0], 1, shape[2]) + 0.5
    expected = near.double()

    sums = torch.empty_like(factor)
    channels.square_sum(x, sums)
    close(sums, expected.square().sum(1, keepdim=True))

    scaled = x.clone()
    dots, total = channels.gate(x, x, scaled, factor, total=True)
    close(dots.sum(0), expected.square().sum(1, keepdim=True))
    close(scaled, factor * expected)
    close(total.sum(0), (factor * expected).sum((0, 2)))

    other = far_apart(near.flip(1), strides(far))
    channels.blend(x, x, factor, other, None)
    close(x, expected + factor * expected.flip(1))


@pytest.mark.parametrize("stride", [2**26 + 8, 2**27])
def test_few_rows_by_a_small_weight(stride):
    """Rows from a slice, as the last tokens of texts, and a sliced weight are supported."""
    count, n_in, n_out = 40, 24, 33
    form = UNIT
    x, weight, g = torch.randn(count, n_in), torch.randn(n_out, n_in), torch.randn(count, n_out)
    far_x, far_weight = (far_apart(t.to(BFLOAT16), (stride, 1)) for t in (x, weight))
    x, weight, g = (t.to(BFLOAT16).double() for t in (x, weight, g))
    z, y = torch.empty(count, n_out, dtype=BFLOAT16), torch.empty(count, n_out)
    factor = small.small_forward(far_x, far_weight, None, z, y, form)
    f = (x.square().sum(1) + 1).rsqrt()
    close(factor, f)
    close(z, f[:, None] * (x @ weight.t()))
    dx, dw = torch.empty(count, n_in, dtype=BFLOAT16), torch.empty(n_out, n_in, dtype=BFLOAT16)
    far_g = far_apart(g.to(BFLOAT16), (stride, 1))
    small.small_backward(far_g, far_x, far_weight, y, factor, dx, dw, None, form=form)
    h = f[:, None] * g
    close(dw, h.t() @ x)
    along = (g * (x @ weight.t())).sum(1)
    close(dx, h @ weight - (f**3 * along)[:, None] * x)


@pytest.mark.parametrize("stride", [2**30, 2**31, 2**32 + 1])
def test_rows(stride):
    near = torch.randn(3, 20).to(BFLOAT16)
    x, expected = far_apart(near, (stride, 1)), near.double()
    factor, unit = torch.empty(3), torch.empty(3, 20, dtype=BFLOAT16)
    rows.unit_rows(x, factor, unit, form=UNIT)
    f = (expected.square().sum(1) + 1).rsqrt()
    close(factor, f)
    close(unit, f[:, None] * expected)
    dx = torch.empty_like(unit)
    rows.unit_rows_backward(x, x, factor, None, dx, form=UNIT, is_unit=False)
    close(dx, (f**3)[:, None] * expected)
    packed = torch.empty(3, 24, dtype=BFLOAT16)
    rows.pack(x, near[:, 0], packed)
    assert torch.equal(packed[:, :20], near)

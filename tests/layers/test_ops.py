"""The plain expressions under the corrected layers: values, dtypes, derivatives, transforms."""

import subprocess
import sys

import pytest
import torch
from adiv_layers import ops, scaled_linear
from adiv_layers.forms import Correction
from adiv_layers.kernels.choice import kernels_for
from adiv_layers.kernels.maps import Patches
from torch.autograd import gradcheck, gradgradcheck

CONSTANTS = [1.0, 0.3, 0.0]
HALVES = [torch.float16, torch.bfloat16]


def form(constant):
    return Correction(1.0, 1.0, constant, 1e-12)


def unit_row(x, constant, eps=1e-12):
    """Return one row as in the paper: r = 1/√(‖x‖² + constant), or 1/max(‖x‖, eps)."""
    square = sum(float(value) ** 2 for value in x)
    r = (square + constant) ** -0.5 if constant > 0 else 1 / max(square**0.5, eps)
    return [r * float(value) for value in x], r


@pytest.mark.parametrize("constant", CONSTANTS)
def test_every_row_follows_the_formula(constant):
    x = torch.randn(2, 3, 7, dtype=torch.float64) * 3
    unit, r = ops.unit_rows(x, form(constant))
    assert unit.shape == (2, 3, 7) and r.shape == (2, 3, 1)
    expected = [unit_row(row, constant) for row in x.flatten(0, 1)]
    torch.testing.assert_close(unit.flatten(0, 1), torch.tensor([u for u, _ in expected]).double())
    torch.testing.assert_close(r.flatten(), torch.tensor([r for _, r in expected]).double())


@pytest.mark.parametrize("constant", CONSTANTS)
def test_first_and_second_derivatives(constant):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: ops.unit_rows(x, form(constant)), x)
    assert gradgradcheck(lambda x: ops.unit_rows(x, form(constant)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("constant", CONSTANTS)
def test_zero_rows_have_finite_first_and_second_derivatives(constant, dtype):
    x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    unit, r = ops.unit_rows(x, form(constant))
    assert (unit == 0).all() and r.isfinite().all()
    (first,) = torch.autograd.grad(unit.sum() + r.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.isfinite().all() and second.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sums_in_half_precision_are_taken_in_single(dtype):
    x = torch.full((1, 4096), 100.0, dtype=dtype)  # in float16 ‖x‖² would be infinite
    unit, r = ops.unit_rows(x, form(0.0))
    assert unit.dtype == dtype and r.dtype == torch.float32
    torch.testing.assert_close(r.item(), 1 / 6400, rtol=1e-6, atol=0)
    torch.testing.assert_close(unit, torch.full_like(x, 1 / 64))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_narrows_the_rows_but_not_their_factor(dtype):
    x = torch.randn(3, 50)
    expected, factor = ops.unit_rows(x, form(1.0))
    with torch.autocast("cpu", dtype=dtype):
        unit, r = ops.unit_rows(x, form(1.0))
        wide, _ = ops.unit_rows(x.double(), form(1.0))
    assert torch.equal(unit, expected.to(dtype)) and torch.equal(r, factor)
    assert wide.dtype == torch.float64


def test_affine_like_map_of_unit_rows():
    x, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 5), (3, 5), (3,)))
    z = scaled_linear.scale_input(x, weight, bias, form(1.0))
    expected = (x @ weight.t() + bias) / (x.square().sum(-1, keepdim=True) + 1).sqrt()
    torch.testing.assert_close(z, expected)


def test_without_kernels_scaled_is_the_plain_expression():
    x, weight, bias = torch.randn(2, 5, 9), torch.randn(3, 5, 1), torch.randn(3)
    patches = Patches([1], [1], [0], [1], 1)
    seen = []

    def plain(*inputs):
        seen.append(inputs)
        return x

    assert ops.output_scaled(patches, plain, x, weight, bias, form(1.0)) is x
    assert seen == [(x, weight, bias)]


def test_no_kernels_without_a_gpu():
    assert kernels_for(torch.randn(2, 3)) is None
    assert kernels_for(torch.randn(2, 3), None, torch.randn(3, device="meta")) is None


@pytest.mark.slow
def test_triton_is_not_imported_before_it_is_needed():
    code = (
        "import sys, torch, adiv_layers.functional as f\n"
        "f.affine_like_linear(torch.randn(2, 3), torch.randn(4, 3), torch.randn(4))\n"
        "assert 'adiv_layers.kernels.rows' not in sys.modules\n"
    )
    search = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=search)

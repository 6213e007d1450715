"""The public maps on kernels: gradient-only rows of all lengths, and inputs that are not finite."""

import pytest
import torch
from adiv_layers import functional
from interpreted import relative_error

KIND = {"affine-like": functional.affine_like_linear, "norm-like": functional.norm_like_linear}
LENGTHS = torch.tensor([1e-3, 0.05, 0.3, 1.0, 4.0, 100.0])  # short and long rows


def rows_of_all_lengths(width):
    x = torch.randn(len(LENGTHS), width)
    return x / x.norm(dim=1, keepdim=True) * LENGTHS[:, None]


def gradient_only(form, length):
    weight, bias = torch.randn(5, 20, requires_grad=True), torch.randn(5, requires_grad=True)
    x, g = rows_of_all_lengths(20) * length, torch.randn(len(LENGTHS), 5)
    functional.gradient_only_linear(x, weight, bias, form=form).backward(g)
    return x.double(), g.double(), weight.grad, bias.grad


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3])
def test_gradient_only_of_short_and_long_rows(length):
    x, g, dw, db = gradient_only("proportional", length)
    share = 1 / (x.square().sum(1, keepdim=True) + 1)
    assert relative_error(dw, (share * g).t() @ x) < 1e-6
    assert relative_error(db, (share * g).sum(0)) < 1e-6
    x, g, dw, db = gradient_only("disproportional", length)
    assert relative_error(dw, (g / (2 * x.square().sum(1, keepdim=True))).t() @ x) < 1e-6
    assert relative_error(db, 0.5 * g.sum(0)) < 1e-6


def finite_rows(z):
    return z.isfinite().flatten(1).all(1).tolist()


# NumPy, on which the interpreter runs, warns of 0·∞.
@pytest.mark.slow(one_in=3)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(20, 33), (200, 7)], ids=["wide output", "narrow output"])
@pytest.mark.parametrize("form", KIND)
def test_a_row_that_is_not_finite_stays_so_and_alone(form, shape, bad):
    n_in, n_out = shape
    x, weight, bias = torch.randn(3, n_in), torch.randn(n_out, n_in), torch.randn(n_out)
    x[1, 4] = bad
    x.requires_grad_()
    z = KIND[form](x, weight, bias)
    assert finite_rows(z) == [True, False, True]
    (dx,) = torch.autograd.grad(z, x, torch.ones_like(z))
    assert finite_rows(dx) == [True, False, True]

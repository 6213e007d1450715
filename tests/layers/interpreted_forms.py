"""The public maps on kernels: the range of their settings, and inputs that are not finite."""

import pytest
import torch
from adiv_layers import functional
from interpreted import BFLOAT16, FLOAT32, FLOAT64, check, relative_error

AFFINE = [(1, 1), (2, 0.5), (2, 0.3), (0.5, 2), (-1, 1), (3, -0.1), (1, 1e-3), (1e-2, 1)]
NORM = [(1, 1), (1, -1), (-2, 1), (0.5**0.5, 0.5**0.5), (-1, 0.3), (1, 0), (3, -0.9)]
KIND = {"affine-like": functional.affine_like_linear, "norm-like": functional.norm_like_linear}
CASES = [("affine-like", *pair) for pair in AFFINE] + [("norm-like", *pair) for pair in NORM]
LENGTHS = torch.tensor([1e-3, 0.05, 0.3, 1.0, 4.0, 100.0])  # short and long rows


def rows_of_all_lengths(width):
    x = torch.randn(len(LENGTHS), width)
    return x / x.norm(dim=1, keepdim=True) * LENGTHS[:, None]


def divisors(form, alpha, beta, squares):
    """Return, per row, the factors of Wx and of b in a form, as in the paper."""
    if form == "affine-like":
        s = (alpha**2 * squares + beta**2).sqrt()
        return alpha / s, beta / s
    s = squares.sqrt() if abs(beta) == 1 else (alpha**2 * squares / (1 - beta**2)).sqrt()
    return alpha / s, torch.full_like(s, beta)


def linear_reference(form, alpha, beta):
    def reference(x, weight, bias):
        first, second = divisors(form, alpha, beta, x.square().sum(-1, keepdim=True))
        return first * (x @ weight.t()) + second * bias

    return reference


def patch_reference(form, alpha, beta):
    def reference(x, weight, bias):
        ones = torch.ones_like(weight[:1])
        squares = torch.nn.functional.conv2d(x.square(), ones, padding=1)
        first, second = divisors(form, alpha, beta, squares)
        output = torch.nn.functional.conv2d(x, weight, padding=1)
        return first * output + second * bias.view(-1, 1, 1)

    return reference


@pytest.mark.slow(one_in=37)
@pytest.mark.parametrize(("form", "alpha", "beta"), CASES)
@pytest.mark.parametrize("shape", [(20, 33), (200, 7)], ids=["wide output", "narrow output"])
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16], ids=str)
def test_linear_over_the_range_of_alpha_and_beta(form, alpha, beta, shape, dtype):
    n_in, n_out = shape
    inputs = [rows_of_all_lengths(n_in), torch.randn(n_out, n_in), torch.randn(n_out)]
    upstream = [torch.randn(len(LENGTHS), n_out)]

    def function(x, weight, bias):
        return KIND[form](x, weight, bias, alpha=alpha, beta=beta)

    check(function, linear_reference(form, alpha, beta), inputs, upstream, dtype)


@pytest.mark.slow(one_in=19)
@pytest.mark.parametrize(("form", "alpha", "beta"), CASES)
def test_patch_norm_over_the_range_of_alpha_and_beta(form, alpha, beta):
    images = rows_of_all_lengths(3 * 6 * 5).view(-1, 3, 6, 5)
    inputs = [images, torch.randn(4, 3, 3, 3), torch.randn(4)]
    upstream = [torch.randn(len(LENGTHS), 4, 6, 5)]

    def function(x, weight, bias):
        return functional.patch_norm_conv(
            x, weight, bias, padding=1, form=form, alpha=alpha, beta=beta
        )

    check(function, patch_reference(form, alpha, beta), inputs, upstream, FLOAT64)


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

"""The public maps on kernels: gradient-only rows of all lengths, and inputs that are not finite."""

import pytest
import torch
from adiv_layers import functional

KIND = {"affine-like": functional.affine_like_linear, "norm-like": functional.norm_like_linear}


def finite_rows(z):
    return z.isfinite().flatten(1).all(1).tolist()


# NumPy, on which the interpreter runs, warns of 0·∞.
@pytest.mark.slow(one_in=5)
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

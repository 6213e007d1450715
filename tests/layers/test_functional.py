"""The corrected maps agree with a row-by-row reference, as do their derivatives in float64."""

import math

import pytest
import torch
from adiv_layers import functional
from torch.autograd import gradcheck, gradgradcheck

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
AFFINE_LIKE = [(1.0, 1.0), (0.5, 1.0), (2.0, -3.0), (-1.5, 0.25)]
NORM_LIKE = [(1.0, 1.0), (2.0, 1.0), (3.0, 0.5), (-1.0, -0.8), (1.0, 0.0), (0.5, -1.0)]


def affine_like_row(x, weight, bias, alpha, beta):
    """Return (αWx + βb)/√(α²‖x‖² + β²), as in the paper."""
    divisor = math.sqrt(alpha**2 * float(x @ x) + beta**2)
    return (alpha * (weight @ x) + (0 if bias is None else beta * bias)) / divisor


def norm_like_row(x, weight, bias, alpha, beta):
    """Return αWx/s + βb with s = √(α²‖x‖²/(1−β²)), or ‖x‖ where |β| = 1."""
    length = math.sqrt(float(x @ x))
    divisor = length if abs(beta) == 1 else abs(alpha) * length / math.sqrt(1 - beta**2)
    return alpha * (weight @ x) / divisor + (0 if bias is None else beta * bias)


CASES = [
    *((functional.affine_like_linear, affine_like_row, *setting) for setting in AFFINE_LIKE),
    *((functional.norm_like_linear, norm_like_row, *setting) for setting in NORM_LIKE),
]
IDS = [f"{case[0].__name__}-{case[2]}-{case[3]}" for case in CASES]


def tensors(n_in=5, n_out=4, lead=(6,), bias=True, dtype=torch.float64):
    x = torch.randn(*lead, n_in, dtype=dtype) * 3
    weight = torch.randn(n_out, n_in, dtype=dtype)
    return x, weight, torch.randn(n_out, dtype=dtype) if bias else None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("function", "row", "alpha", "beta"), CASES, ids=IDS)
def test_every_row_follows_the_formula(function, row, alpha, beta, bias):
    x, weight, bias = tensors(lead=(2, 3), bias=bias)
    expected = torch.stack([row(r, weight, bias, alpha, beta) for r in x.flatten(0, 1)])
    actual = function(x, weight, bias, alpha=alpha, beta=beta)
    assert actual.shape == (2, 3, 4)
    torch.testing.assert_close(actual, expected.view(2, 3, 4), **TIGHT)


@pytest.mark.slow(one_in=17)
@pytest.mark.parametrize("shape", [(5, 4), (37, 2)], ids=["wide", "tall"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("function", "row", "alpha", "beta"), CASES, ids=IDS)
def test_first_and_second_derivatives(function, row, alpha, beta, bias, shape):
    x, weight, bias = tensors(*shape, lead=(3,), bias=bias)
    inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]

    def call(x, weight, bias=None):
        return function(x, weight, bias, alpha=alpha, beta=beta)

    assert gradcheck(call, inputs, fast_mode=shape[0] > 5)
    assert gradgradcheck(call, inputs, fast_mode=shape[0] > 5)


def scale(function, x, n_out=3, **settings):
    """Return ‖φ‖² of one row: the squared length of d output_0 / d [W_0 | b_0]."""
    weight = torch.randn(n_out, x.shape[-1], dtype=x.dtype, requires_grad=True)
    bias = torch.randn(n_out, dtype=x.dtype, requires_grad=True)
    output = function(x, weight, bias, **settings)
    gradients = torch.autograd.grad(output[0], (weight, bias))
    return sum(float(g.square().sum()) for g in gradients)


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(
    ("function", "settings", "expected"),
    [
        *((functional.affine_like_linear, {"alpha": a, "beta": b}, 1.0) for a, b in AFFINE_LIKE),
        (functional.norm_like_linear, {}, 2.0),
        (functional.norm_like_linear, {"alpha": 2.0, "beta": 1.0}, 5.0),
        (functional.norm_like_linear, {"alpha": 2.0, "beta": 0.6}, 1.0),
        (functional.norm_like_linear, {"alpha": -2.0, "beta": -0.3}, 1.0),
    ],
)
def test_scale_is_the_same_for_every_row(function, settings, expected, length):
    x = torch.randn(7, dtype=torch.float64)
    x = x / x.norm() * length
    assert scale(function, x, **settings) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 0, 3), (2, 1, 3)])
@pytest.mark.parametrize("n_in", [1, 5, 33])
@pytest.mark.parametrize("function", [functional.affine_like_linear, functional.norm_like_linear])
def test_odd_shapes(function, n_in, lead):
    x, weight, bias = tensors(n_in, 1, lead)
    x.requires_grad_()
    output = function(x, weight, bias)
    output.sum().backward()
    assert output.shape == (*lead, 1)
    assert x.grad.shape == x.shape
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("function", [functional.affine_like_linear, functional.norm_like_linear])
def test_non_contiguous_inputs(function):
    x, weight, bias = tensors(n_in=6, n_out=4, lead=(8,))
    for strided in (x.t().contiguous().t(), x[::2], x.flip(0)[:, ::3], x[:1].expand(5, 6)):
        columns = strided.shape[1]
        actual = function(strided, weight[:, :columns], bias)
        expected = function(strided.contiguous(), weight[:, :columns].contiguous(), bias)
        torch.testing.assert_close(actual, expected, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_in", [5, 64])
@pytest.mark.parametrize("function", [functional.affine_like_linear, functional.norm_like_linear])
def test_zero_rows_give_the_bias_and_finite_gradients(function, n_in, dtype):
    x, weight, bias = tensors(n_in, 4, (3,), dtype=dtype)
    x[1] = 0
    x.requires_grad_()
    output = function(x, weight.requires_grad_(), bias.requires_grad_())
    assert torch.equal(output[1], bias)
    gradients = torch.autograd.grad(output.mean(), (x, weight, bias), create_graph=True)
    assert all(torch.isfinite(g).all() for g in gradients)
    if dtype != torch.float16:  # float16 ends at 65504; the norm-like slope at 0 is 1/eps
        second = torch.autograd.grad(gradients[0][0].sum() + gradients[0][1].sum(), (x, weight))
        assert all(torch.isfinite(g).all() for g in second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [functional.affine_like_linear, functional.norm_like_linear])
def test_half_precision_sums_squares_in_float32(function, dtype):
    # 300² overflows fp16, and a sum of 4096 bf16 squares in bf16 would stop growing at 256.
    x = torch.full((2, 4096), 300.0, dtype=dtype)
    weight = torch.full((1, 4096), 2**-6, dtype=dtype)
    output = function(x, weight, torch.zeros(1, dtype=dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), torch.ones(2, 1).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("shape", [(5, 4), (37, 2)], ids=["wide", "tall"])
def test_rows_shorter_than_eps_are_divided_by_eps(shape):
    inputs = [tensor.requires_grad_() for tensor in tensors(*shape, lead=(3,))]
    x, weight, bias = inputs

    def call(x, weight, bias):
        return functional.norm_like_linear(x, weight, bias, eps=100.0)

    torch.testing.assert_close(call(*inputs), x @ weight.T / 100 + bias, **TIGHT)
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


@pytest.mark.parametrize("shape", [(5, 4), (37, 2)], ids=["wide", "tall"])
@pytest.mark.parametrize("function", [functional.affine_like_linear, functional.norm_like_linear])
def test_the_output_may_be_overwritten(function, shape):
    inputs = [tensor.requires_grad_() for tensor in tensors(*shape)]
    gradients = [
        torch.autograd.grad(relu(function(*inputs)).sum(), inputs)
        for relu in (torch.relu, torch.relu_)
    ]
    for after_copy, after_overwriting in zip(*gradients, strict=True):
        assert torch.equal(after_copy, after_overwriting)


def test_l2_norm():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    for dim in (0, 1, 2, -1, -2):
        expected = torch.nn.functional.normalize(x, dim=dim)
        torch.testing.assert_close(functional.l2_norm(x, dim), expected, **TIGHT)
    assert gradcheck(functional.l2_norm, (x, 1))
    assert gradgradcheck(functional.l2_norm, (x, 1))
    assert torch.equal(functional.l2_norm(torch.zeros(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (functional.affine_like_linear, {"alpha": 0.0}),
        (functional.affine_like_linear, {"beta": 0.0}),
        (functional.affine_like_linear, {"alpha": math.inf}),
        (functional.norm_like_linear, {"alpha": 0.0}),
        (functional.norm_like_linear, {"beta": 1.5}),
        (functional.norm_like_linear, {"beta": math.nan}),
        (functional.norm_like_linear, {"eps": 0.0}),
    ],
)
def test_settings_out_of_range(function, settings):
    with pytest.raises(ValueError, match="must be"):
        function(*tensors(), **settings)

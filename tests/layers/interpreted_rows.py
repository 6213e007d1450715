"""Kernels over rows agree with float64 autograd: unit rows, and three ways to a linear map."""

from functools import partial
from itertools import product

import pytest
import torch
from adiv_layers import ops, scaled_linear
from adiv_layers.forms import affine_like, norm_like
from adiv_layers.kernels import choice, functions, launch, maps, rows
from interpreted import DTYPES, FLOAT32, FLOAT64, check, poisoned, relative_error
from torch.autograd import gradcheck, gradgradcheck

FORMS = {
    "affine-like": affine_like(1.0, 1.0),
    "affine-like, α=-2, β=0.6": affine_like(-2.0, 0.6),
    "norm-like": norm_like(1.0, 1.0, 1e-12, FLOAT64),
    "norm-like, α=-1, β=0.6": norm_like(-1.0, 0.6, 1e-12, FLOAT64),
}
# The ends of the ranges of α and β.
EXTREMES = FORMS | {
    "affine-like, α=3, β=-0.1": affine_like(3.0, -0.1),
    "affine-like, α=0.01": affine_like(1e-2, 1.0),
    "affine-like, β=0.001": affine_like(1.0, 1e-3),
    "norm-like, α=-2": norm_like(-2.0, 1.0, 1e-12, FLOAT64),
    "norm-like, β=0": norm_like(1.0, 0.0, 1e-12, FLOAT64),
    "norm-like, α=3, β=-0.9": norm_like(3.0, -0.9, 1e-12, FLOAT64),
}
AFFINE, NORM = FORMS["affine-like"], FORMS["norm-like"]
SHAPES = [(1, 50), (7, 3), (9, 100), (33, 257), (4, 1000), (3, 777)]


def rows_reference(form):
    """Return x̂ and f as in the paper, differentiable wherever x is not 0."""

    def reference(x):
        if form.constant > 0:
            length = (x.square().sum(-1, keepdim=True) + form.constant).sqrt()
        else:
            length = torch.clamp(x.norm(dim=-1, keepdim=True), min=form.eps)
        f = form.gain / length
        return f * x, f

    return reference


@pytest.mark.slow(one_in=41)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_rows(shape, form, dtype, monkeypatch):
    if shape[1] == 777:  # in blocks
        monkeypatch.setattr(launch, "_ROW", {FLOAT32: 64, FLOAT64: 32})
    upstream = [torch.randn(*shape), torch.randn(shape[0], 1)]
    with poisoned(monkeypatch):
        check(
            partial(ops.unit_rows, form=FORMS[form]),
            rows_reference(FORMS[form]),
            [torch.randn(*shape) + 0.1],
            upstream,
            dtype,
        )


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("form", FORMS)
def test_zero_and_short_rows(form):
    # Longer than row 2, so that the norm-like f is clamped there and its derivative is 0.
    form = FORMS[form]._replace(eps=1e-2)
    x = torch.randn(4, 6, dtype=FLOAT64)
    x[1] = 0.0
    x[2] *= 1e-3 / x[2].norm()
    x.requires_grad_()
    unit, f = ops.unit_rows(x, form)
    u, gamma = torch.randn_like(unit), torch.randn_like(f)
    (dx,) = torch.autograd.grad((unit, f), x, (u, gamma))
    other = x.detach()[[0, 2, 3]].requires_grad_()
    expected, _ = pair = rows_reference(form)(other)
    (expected_dx,) = torch.autograd.grad(pair, other, (u[[0, 2, 3]], gamma[[0, 2, 3]]))
    torch.testing.assert_close(unit[[0, 2, 3]], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(dx[[0, 2, 3]], expected_dx, rtol=1e-11, atol=1e-14)
    assert (unit[1] == 0).all()
    torch.testing.assert_close(dx[1], f[1] * u[1], rtol=1e-12, atol=0)


@pytest.mark.slow(one_in=23)
@pytest.mark.parametrize("block", [16, 64], ids=["in blocks", "whole"])
@pytest.mark.parametrize("stride", [24, 25, 28, 31, 32])
@pytest.mark.parametrize("start", [0, 1, 4, 7])
def test_nothing_beside_rows_is_read_or_written(start, stride, block, monkeypatch):
    monkeypatch.setattr(rows, "rows_tile", lambda *_: launch.Rows(2, block, 1))
    width = 17

    def among(value):
        """Return nine rows of this width, and the memory that contains them with gaps."""
        memory = torch.full((16 + 9 * stride,), value)
        return memory, memory.as_strided((9, width), (stride, 1), start)

    def at_once(memory):
        """Return nine contiguous rows within the memory."""
        return memory[start : start + 9 * width].view(9, width)

    (_, x), (_, u) = (among(float("nan")) for _ in range(2))
    x[:], u[:] = torch.randn(9, width), torch.randn(9, width)
    written, factor = torch.full((16 + 9 * stride,), 7.0), torch.empty(9)
    rows.unit_rows(x, factor, at_once(written), form=AFFINE)
    f = (x.square().sum(1, keepdim=True) + 1).rsqrt()
    torch.testing.assert_close(factor, f.squeeze(1))
    torch.testing.assert_close(at_once(written), f * x)
    beside = torch.full((16 + 9 * stride,), 7.0)
    given = u, x, factor, None, at_once(beside)
    rows.unit_rows_backward(*given, form=AFFINE, is_unit=False)
    torch.testing.assert_close(at_once(beside), f * (u - (u * x).sum(1, keepdim=True) * f * f * x))
    for memory in (written, beside):
        assert (memory[:start] == 7).all() and (memory[start + 9 * width :] == 7).all()


def strange_layouts():
    base = torch.randn(12, 14, dtype=FLOAT64)
    return {
        "transposed": base.t(),
        "every second column": base[:, ::2],
        "every second row": base[::2],
        "inner columns": base[:, 3:10],
        "expanded rows": base[:1].expand(5, 14),
        "expanded columns": base[:, :1].expand(12, 7),
        "expanded number": base[:1, :1].expand(6, 5),
        "three dimensions": torch.randn(3, 4, 5, dtype=FLOAT64).transpose(0, 2),
        "one dimension": base[0],
    }


@pytest.mark.parametrize("layout", strange_layouts())
def test_layout_of_inputs_and_gradients(layout):
    x, u = strange_layouts()[layout], strange_layouts()[layout]
    leading = x.shape[:-1]
    check(
        partial(ops.unit_rows, form=AFFINE),
        rows_reference(AFFINE),
        [x],
        [u, torch.ones(1, dtype=FLOAT64).expand(*leading, 1)],
        FLOAT64,
    )


def with_kernels(function, plain):
    """Apply the function on kernels where they are used, otherwise the plain expression."""

    def call(x, weight, bias=None):
        kernels = choice.kernels_for(x, weight, bias)
        if kernels is None:
            return plain(x, weight, bias)
        return function(kernels, plain, x, weight, bias, ops.linear_dtype(x))

    return call


def by_input(form):
    return with_kernels(
        lambda kernels, _, *inputs: kernels.input_scaled(*inputs[:3], form, inputs[3]),
        partial(scaled_linear.scale_input, form=form),
    )


def by_output(form):
    return with_kernels(
        lambda kernels, plain, x, weight, bias, dtype: kernels.output_scaled(
            maps.Rows(), plain, x, weight, bias, form, dtype
        ),
        partial(scaled_linear.scale_output, form=form),
    )


def in_one_kernel(form):
    return with_kernels(
        lambda kernels, plain, x, weight, bias, dtype: kernels.SmallLinear.apply(
            plain, x, weight, bias, form, dtype
        ),
        partial(scaled_linear.scale_input, form=form),
    )


def linear_reference(form):
    def reference(x, weight, bias=None):
        unit, f = rows_reference(form)(x)
        shift = 0 if bias is None else form.shift * (f * bias if form.constant > 0 else bias)
        return unit @ weight.t() + shift

    return reference


MAPS = [
    pytest.param(way, FORMS[form], id=f"{way.__name__}, {form}")
    for way in (by_input, by_output)
    for form in FORMS
]
ALL_MAPS = MAPS + [
    pytest.param(in_one_kernel, FORMS[form], id=f"in_one_kernel, {form}") for form in FORMS
]
FEWER_ROWS_THAN_INPUTS = [(5, 50, 7), (13, 257, 65)]
MORE_ROWS_THAN_INPUTS = [(40, 16, 9), (33, 31, 20)]


FEW_ROWS = [(1, 50, 7), (64, 130, 40), (32, 520, 32), (16, 16, 16), (2, 33, 300)]
LINEAR = [
    *product((by_input, by_output), FEWER_ROWS_THAN_INPUTS + MORE_ROWS_THAN_INPUTS, DTYPES, [3]),
    *product([in_one_kernel], FEW_ROWS, DTYPES[1:], [2, 3]),  # a small weight, with a bias or none
]


@pytest.mark.slow(one_in=107)
@pytest.mark.parametrize("form", EXTREMES)
@pytest.mark.parametrize(("way", "shape", "dtype", "given"), LINEAR)
def test_linear_maps(way, form, shape, dtype, given, monkeypatch):
    """Of short and of long rows."""
    (m, k, n), form = shape, EXTREMES[form]
    x = torch.randn(m, k) * torch.logspace(-3, 1, m)[:, None]
    inputs = [x, torch.randn(n, k) / k**0.5, torch.randn(n)]
    with poisoned(monkeypatch):
        check(way(form), linear_reference(form), inputs[:given], [torch.randn(m, n)], dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "form"), MAPS)
def test_many_tiles_and_many_programs(way, form, monkeypatch):
    """Small tiles give several column tiles, several programs, and several steps per program."""
    monkeypatch.setattr(launch, "_TILE", 32)
    monkeypatch.setattr(launch, "_ACROSS", 8)
    monkeypatch.setattr(launch, "_multiprocessors", lambda _: 20)
    inputs = [torch.randn(70, 12), torch.randn(29, 12), torch.randn(29)]
    upstream = [torch.randn(70, 29)]
    check(way(form), linear_reference(form), inputs, upstream, FLOAT64)


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize("layout", ["three dimensions", "expanded", "transposed", "one dimension"])
@pytest.mark.parametrize(("way", "form"), ALL_MAPS)
def test_layout_of_rows(way, form, layout):
    dtype = FLOAT32 if way is in_one_kernel else FLOAT64
    x, g = torch.randn(2, 3, 11, dtype=dtype), torch.randn(2, 3, 7, dtype=dtype)
    weight = torch.randn(7, 11, dtype=dtype)
    if layout == "expanded":
        g = torch.ones((), dtype=dtype).expand_as(g)  # the gradient from sum().backward()
    elif layout == "transposed":
        x, weight = x.transpose(0, 1), torch.randn(11, 7, dtype=dtype).t()
        g = torch.randn(7, 2, 3, dtype=dtype).permute(2, 1, 0)
    elif layout == "one dimension":
        x, g = x[0, 0], g[0, 0]
    inputs = [x, weight, torch.randn(7, dtype=dtype)]
    check(way(form), linear_reference(form), inputs, [g], dtype)


@pytest.mark.slow(one_in=16)
@pytest.mark.parametrize(("way", "form"), MAPS)
@pytest.mark.parametrize("rows", [2, 4], ids=["few rows", "many rows"])
def test_derivatives_by_finite_differences(way, form, rows):
    x, w, b = torch.randn(rows, 3), torch.randn(2, 3), torch.randn(2)
    inputs = [t.double().requires_grad_() for t in (x, w, b)]
    assert gradcheck(way(form), inputs, fast_mode=True)
    assert gradgradcheck(way(form), inputs, fast_mode=True)


def test_derivatives_of_derivatives_of_few_rows():
    form = FORMS["affine-like, α=-2, β=0.6"]
    inputs = [torch.randn(s, requires_grad=True) for s in ((3, 20), (5, 20), (5,))]
    found, expected = (
        torch.autograd.grad(
            sum(t.square().sum() for t in torch.autograd.grad(
                function(*inputs).square().sum(), inputs, create_graph=True
            )), inputs)
        for function in (in_one_kernel(form), linear_reference(form))
    )  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.slow(one_in=17)
@pytest.mark.parametrize("wanted", range(3), ids=["x", "W", "b"])
@pytest.mark.parametrize(("way", "form"), ALL_MAPS)
@pytest.mark.parametrize("rows", [3, 12], ids=["few rows", "many rows"])
def test_one_gradient_alone(way, form, wanted, rows):
    inputs = [torch.randn(rows, 9), torch.randn(2, 9), torch.randn(2)]
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(i == wanted)
    way(form)(*inputs).square().sum().backward()
    (expected,) = torch.autograd.grad(
        linear_reference(form)(*inputs).square().sum(), inputs[wanted]
    )
    for i, tensor in enumerate(inputs):
        assert (tensor.grad is not None) is (i == wanted)
    assert relative_error(inputs[wanted].grad, expected) < 1e-5


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize(("way", "form"), ALL_MAPS)
def test_output_may_be_overwritten(way, form):
    inputs = [torch.randn(s, requires_grad=True) for s in ((3, 9), (2, 9), (2,))]
    way(form)(*inputs).relu_().sum().backward()
    inplace = [t.grad for t in inputs]
    again = torch.autograd.grad(way(form)(*inputs).relu().sum(), inputs)
    for one, other in zip(inplace, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow(one_in=11)
@pytest.mark.parametrize("shape", [(7, 10, 33), (33, 65, 25)], ids=["scale x", "scale g"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("proportional", [True, False], ids=["proportional", "disproportional"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_row_gradients(shape, dtype, proportional, bias, monkeypatch):
    m, k, n = shape
    lengths = torch.logspace(-3, 1, m)[:, None]  # short and long rows
    x, g = (lengths * torch.randn(m, k)).to(dtype), (lengths * torch.randn(m, n)).to(dtype)
    with poisoned(monkeypatch):
        dw, db = functions.row_gradients(x, g, bias, proportional, 1e-12)
    square = x.double().square().sum(1, keepdim=True)
    share = 1 / (square + 1) if proportional and bias else (0.5 if bias else 1) / square
    expected = (share * g.double()).t() @ x.double()
    expected_db = (g.double() * (share if proportional else 0.5)).sum(0)
    allowed = {FLOAT64: 1e-12, FLOAT32: 1e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert dw.dtype == dtype and relative_error(dw, expected) <= allowed
    assert (db is not None) is bias
    if bias:
        assert db.dtype == dtype and relative_error(db, expected_db) <= allowed


@pytest.mark.slow(one_in=11)
@pytest.mark.parametrize(("way", "form"), ALL_MAPS)
@pytest.mark.parametrize("rows", [5, 64])
def test_autocast_writes_the_narrow_dtype_at_once(way, form, rows):
    x, w = torch.randn(rows, 40, requires_grad=True), torch.randn(3, 40, requires_grad=True)
    b = torch.randn(3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        unit, f = ops.unit_rows(x, form)
        z = way(form)(x, w, b)
    assert (unit.dtype, f.dtype, z.dtype) == (torch.bfloat16, FLOAT32, torch.bfloat16)
    gradients = torch.autograd.grad(z, (x, w, b), torch.ones_like(z))
    assert [g.dtype for g in gradients] == [FLOAT32] * 3
    inputs = [t.detach().double().requires_grad_() for t in (x, w, b)]
    expected = linear_reference(form)(*inputs)
    assert relative_error(z, expected) <= 1e-2
    truth = torch.autograd.grad(expected.sum(), inputs)
    for actual, true in zip(gradients, truth, strict=True):
        assert relative_error(actual, true) <= 2e-2

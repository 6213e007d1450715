"""Kernels over rows against float64 autograd: unit rows, affine-like, output scaling."""

import pytest
import torch
import torch.nn.functional as F
from adiv_layers import ops
from adiv_layers.kernels import channels, launch
from interpreted import DTYPES, FLOAT32, FLOAT64, check, poisoned, relative_error
from torch.autograd import gradcheck, gradgradcheck

CONSTANTS = [1.0, 0.3, 0.0]
SHAPES = [(1, 50), (7, 3), (9, 100), (33, 257), (4, 1000)]


def rows_reference(constant, eps=1e-12):
    """x̂ and r as printed, differentiable wherever x is not 0."""

    def reference(x):
        length = x.norm(dim=-1, keepdim=True)
        r = 1 / (x.square().sum(-1, keepdim=True) + constant).sqrt()
        r = r if constant > 0 else 1 / torch.clamp(length, min=eps)
        return r * x, r

    return reference


@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_rows(shape, constant, dtype, monkeypatch):
    upstream = [torch.randn(*shape), torch.randn(shape[0], 1)]
    with poisoned(monkeypatch):
        check(
            lambda x: ops.unit_rows(x, constant),
            rows_reference(constant),
            [torch.randn(*shape) + 0.1],
            upstream,
            dtype,
        )


@pytest.mark.parametrize("constant", [1.0, 0.3])
def test_one_number(constant):
    upstream = [torch.randn(1, 1), torch.randn(1, 1)]
    function, reference = lambda x: ops.unit_rows(x, constant), rows_reference(constant)
    check(function, reference, [torch.randn(1, 1)], upstream, FLOAT64)
    inputs = [torch.randn(1, 1), torch.randn(1, 1), torch.randn(1)]
    check(affine_like(constant), affine_reference(constant), inputs, upstream[:1], FLOAT64)


@pytest.mark.parametrize("used", [0, 1], ids=["only x̂", "only r"])
def test_unit_rows_where_one_result_is_not_used(used):
    upstream = [torch.randn(5, 20), torch.randn(5, 1)]
    upstream[1 - used] = None
    inputs = [torch.randn(5, 20)]
    check(lambda x: ops.unit_rows(x, 1.0), rows_reference(1.0), inputs, upstream, FLOAT64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows_are_read_in_blocks(dtype, monkeypatch):
    monkeypatch.setattr(launch, "_ROW", {FLOAT32: 64, FLOAT64: 32})
    upstream = [torch.randn(3, 777), torch.randn(3, 1)]
    with poisoned(monkeypatch):
        check(
            lambda x: ops.unit_rows(x, 1.0),
            rows_reference(1.0),
            [torch.randn(3, 777)],
            upstream,
            dtype,
        )


@pytest.mark.parametrize("constant", CONSTANTS)
def test_zero_and_short_rows(constant):
    x = torch.randn(4, 6, dtype=FLOAT64)
    x[1] = 0.0
    x[2] *= 1e-3 / x[2].norm()
    x.requires_grad_()
    eps = 1e-2  # longer than row 2, so that r is held there and its derivative is 0
    unit, r = ops.unit_rows(x, constant, eps)
    u, gamma = torch.randn_like(unit), torch.randn_like(r)
    (dx,) = torch.autograd.grad((unit, r), x, (u, gamma))
    other = x.detach()[[0, 2, 3]].requires_grad_()
    expected, _ = pair = rows_reference(constant, eps)(other)
    (expected_dx,) = torch.autograd.grad(pair, other, (u[[0, 2, 3]], gamma[[0, 2, 3]]))
    torch.testing.assert_close(unit[[0, 2, 3]], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(dx[[0, 2, 3]], expected_dx, rtol=1e-11, atol=1e-14)
    assert (unit[1] == 0).all()
    torch.testing.assert_close(dx[1], r[1] * u[1], rtol=1e-12, atol=0)


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
        lambda x: ops.unit_rows(x, 1.0),
        rows_reference(1.0),
        [x],
        [u, torch.ones(1, dtype=FLOAT64).expand(*leading, 1)],
        FLOAT64,
    )


def affine_like(constant):
    def call(x, weight, bias):
        return ops.linear_plus_factor(*ops.unit_rows(x, constant), weight, bias)

    return call


def output_scaled(constant):
    def plain(x, weight, bias):
        _, r = ops.unit_rows(x, constant)
        inner, outer = (bias, None) if constant > 0 else (None, bias)
        scaled = F.linear(x, weight, inner) * r.to(x.dtype)
        return scaled if outer is None else scaled + outer

    def call(x, weight, bias):
        return ops.scaled(ops.Rows(), plain, x, weight, bias, constant, 1e-12)

    return call


def affine_reference(constant):
    def reference(x, weight, bias):
        unit, r = rows_reference(constant)(x)
        return unit @ weight.t() + (r * bias if constant > 0 else bias)

    return reference


MAPS = [(affine_like, 1.0), (affine_like, 0.3), (output_scaled, 1.0), (output_scaled, 0.0)]


@pytest.mark.parametrize(("form", "constant"), MAPS)
@pytest.mark.parametrize(
    "shape", [(1, 50, 7), (7, 100, 33), (13, 257, 65), (16, 1000, 10)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_maps(form, constant, shape, dtype, monkeypatch):
    m, k, n = shape
    inputs = [torch.randn(m, k) + 0.1, torch.randn(n, k) / k**0.5, torch.randn(n)]
    with poisoned(monkeypatch):
        check(form(constant), affine_reference(constant), inputs, [torch.randn(m, n)], dtype)


@pytest.mark.parametrize(("form", "constant"), MAPS)
def test_many_tiles_and_many_programs(form, constant, monkeypatch):
    """Small tiles make several of everything: column tiles, programs, steps of a program."""
    monkeypatch.setattr(launch, "_TILE", 32)
    monkeypatch.setattr(launch, "_ACROSS", 8)
    inputs = [torch.randn(70, 12), torch.randn(29, 12), torch.randn(29)]
    upstream = [torch.randn(70, 29)]
    check(form(constant), affine_reference(constant), inputs, upstream, FLOAT64)


@pytest.mark.parametrize("layout", ["three dimensions", "expanded", "transposed", "one dimension"])
@pytest.mark.parametrize(("form", "constant"), MAPS)
def test_layout_of_rows(form, constant, layout):
    x, g = torch.randn(2, 3, 11, dtype=FLOAT64), torch.randn(2, 3, 2, dtype=FLOAT64)
    if layout == "expanded":
        g = torch.ones((), dtype=FLOAT64).expand_as(g)  # what sum().backward() sends
    elif layout == "transposed":
        x, g = x.transpose(0, 1), torch.randn(2, 2, 3, dtype=FLOAT64).permute(2, 1, 0)
    elif layout == "one dimension":
        x, g = x[0, 0], g[0, 0]
    inputs = [x, torch.randn(2, 11, dtype=FLOAT64), torch.randn(2, dtype=FLOAT64)]
    check(form(constant), affine_reference(constant), inputs, [g], FLOAT64)


@pytest.mark.parametrize(("form", "constant"), MAPS)
def test_derivatives_by_finite_differences(form, constant):
    x, w, b = torch.randn(3, 9), torch.randn(2, 9), torch.randn(2)
    inputs = [t.double().requires_grad_() for t in (x, w, b)]
    assert gradcheck(form(constant), inputs)
    assert gradgradcheck(form(constant), inputs)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_derivatives_of_unit_rows_by_finite_differences(constant):
    x = torch.randn(3, 5, dtype=FLOAT64, requires_grad=True)
    assert gradcheck(lambda x: ops.unit_rows(x, constant), x)
    assert gradgradcheck(lambda x: ops.unit_rows(x, constant), x)


def test_only_what_is_asked_for_is_computed(monkeypatch):
    x, w, b = torch.randn(3, 9), torch.randn(2, 9, requires_grad=True), torch.randn(2)
    started = []
    run = channels.run
    monkeypatch.setattr(channels, "run", lambda k, *a, **o: started.append(k) or run(k, *a, **o))
    for form, constant in MAPS:
        form(constant)(x, w, b).sum().backward()
        assert x.grad is None and b.grad is None and w.grad is not None
    # Behind Wx̂ + r·b the gradient of W alone needs no pass over g; behind a scaled output it does.
    assert started.count(channels.gate_kernel) == 2


def test_a_grid_of_programs_fills_the_device_and_no_more(monkeypatch):
    monkeypatch.setattr(launch, "_multiprocessors", lambda _: 132)
    assert launch.workers(torch.zeros(1), 10_000, 4) == 132  # times 4 columns: 528 slots
    assert launch.workers(torch.zeros(1), 10_000, 7) * 7 <= 528
    assert launch.workers(torch.zeros(1), 5, 1) == 5
    assert launch.workers(torch.zeros(1), 5, 1000) == 1


@pytest.mark.parametrize(("form", "constant"), MAPS)
def test_output_may_be_overwritten(form, constant):
    inputs = [torch.randn(s, requires_grad=True) for s in ((3, 9), (2, 9), (2,))]
    form(constant)(*inputs).relu_().sum().backward()
    inplace = [t.grad for t in inputs]
    again = torch.autograd.grad(form(constant)(*inputs).relu().sum(), inputs)
    for one, other in zip(inplace, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(7, 10, 33), (33, 65, 25)], ids=["scale x", "scale g"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("constant", "gain"), [(1.0, 1.0), (0.0, 0.5), (0.0, 1.0)])
@pytest.mark.parametrize("bias", [True, False])
def test_row_gradients(shape, dtype, constant, gain, bias, monkeypatch):
    m, k, n = shape
    x, g = torch.randn(m, k).to(dtype), torch.randn(m, n).to(dtype)
    with poisoned(monkeypatch):
        dw, db = ops.row_gradients(x, g, constant, 1e-12, gain, bias)
    share = gain / (x.double().square().sum(1, keepdim=True) + constant)
    expected = (share * g.double()).t() @ x.double()
    expected_db = (g.double() * (share if constant > 0 else gain)).sum(0)
    allowed = {FLOAT64: 1e-12, FLOAT32: 1e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert dw.dtype == dtype and relative_error(dw, expected) <= allowed
    assert (db is not None) is bias
    if bias:
        assert db.dtype == dtype and relative_error(db, expected_db) <= allowed


def test_row_gradients_of_zero_rows_are_finite():
    x, g = torch.zeros(4, 20, dtype=torch.float16), torch.ones(4, 2, dtype=torch.float16)
    x[0, 0] = 5e-5  # shorter than eps: as good as zero
    dw, db = ops.row_gradients(x, g, 0.0, 1e-4, 0.5, True)
    assert (dw == 0).all() and (db == 2).all()


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_autocast_writes_the_narrow_dtype_at_once(dtype):
    x = torch.randn(5, 40, dtype=dtype, requires_grad=True)
    w = torch.randn(3, 40, dtype=dtype, requires_grad=True)
    b = torch.randn(3, dtype=dtype, requires_grad=True)
    narrow = torch.bfloat16 if dtype == FLOAT32 else FLOAT64
    for form, constant in MAPS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            unit, r = ops.unit_rows(x, constant)
            z = form(constant)(x, w, b)
        assert (unit.dtype, r.dtype, z.dtype) == (narrow, dtype, narrow)
        gradients = torch.autograd.grad(z, (x, w, b), torch.ones_like(z))
        assert [g.dtype for g in gradients] == [dtype] * 3
        expected = affine_reference(constant)(x.double(), w.double(), b.double())
        assert relative_error(z, expected) <= (1e-2 if dtype == FLOAT32 else 1e-12)

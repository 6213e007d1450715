"""What must hold on a real GPU: kernels against float64, and what an interpreter cannot show."""

import pytest
import torch
from adiv_layers import functional
from adiv_layers.kernels import functions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LINEAR = {  # n_in, n_out
    "wide output": (96, 200),
    "odd": (101, 67),
    "narrow output": (1024, 33),
}
CONV = {  # input, weight, stride, padding, dilation, groups
    "2d": ((4, 32, 17, 16), (48, 32, 3, 3), 1, 1, 1, 1),
    "2d mixed": ((3, 5, 19, 21), (7, 5, 3, 3), 2, 1, 2, 1),
    "2d groups": ((2, 32, 9, 9), (64, 16, 3, 3), 1, 1, 1, 2),
    "1d": ((4, 12, 100), (9, 12, 5), 2, 2, 1, 1),
    "3d": ((2, 6, 7, 8, 9), (5, 6, 3, 3, 3), 1, 1, 1, 1),
}


@pytest.fixture(autouse=True)
def _exact_single_precision():
    """Matrix products are exact by default, convolutions are not."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def results(function, inputs, g):
    """The output and the gradients of all inputs."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    z = function(*inputs)
    return [z, *torch.autograd.grad(z, inputs, g.to(z.dtype))]


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def check(function, inputs, g, monkeypatch):
    """Errors at most twice those of the plain expression, both against float64 on the CPU."""
    truth = results(function, [t.cpu().double() for t in inputs], g.cpu().double())
    found = results(function, inputs, g)
    with monkeypatch.context() as patch:
        patch.setattr(functions, "DEVICES", set())
        plain = results(function, inputs, g)
    for i, (actual, usual, expected) in enumerate(zip(found, plain, truth, strict=True)):
        assert actual.dtype == usual.dtype
        floor = torch.finfo(actual.dtype).eps
        allowed = 2 * max(error(usual.cpu(), expected), floor)
        assert error(actual.cpu(), expected) <= allowed, f"result {i}"


def tensors(*shapes, dtype):
    return [torch.randn(s, device="cuda").to(dtype) for s in shapes]


def test_triton_works_here():
    """Kernels that do not start raise here, with their cause, where a layer would go on without."""
    x = torch.ones(2, 3, device="cuda")
    assert functions.usable(x)
    functions.UnitRows.apply(x, 1.0, 1e-12, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LINEAR)
@pytest.mark.parametrize("name", ["affine_like_linear", "norm_like_linear"])
def test_linear(name, shape, dtype, monkeypatch):
    n_in, n_out = LINEAR[shape]
    x, weight, bias, g = tensors((300, n_in), (n_out, n_in), (n_out,), (300, n_out), dtype=dtype)
    check(getattr(functional, name), [x, weight / n_in**0.5, bias], g, monkeypatch)


@pytest.mark.parametrize("n_in", [64, 4096, 20000, 65536])
def test_rows_of_every_width(n_in, monkeypatch):
    x, weight, g = tensors((33, n_in), (8, n_in), (33, 8), dtype=torch.float32)

    def unit_then_linear(x, weight):
        return functional.l2_norm(x) @ weight.t()

    check(unit_then_linear, [x, weight], g, monkeypatch)


def test_many_rows(monkeypatch):
    x, weight, bias, g = tensors((65536, 64), (48, 64), (48,), (65536, 48), dtype=torch.bfloat16)
    check(functional.affine_like_linear, [x, weight / 8, bias], g, monkeypatch)


# By number of dimensions; torch has one layout for sequences.
LAYOUTS = {
    3: [torch.contiguous_format],
    4: [torch.contiguous_format, torch.channels_last],
    5: [torch.contiguous_format, torch.channels_last_3d],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["affine-like", "norm-like"])
@pytest.mark.parametrize(
    ("case", "layout"),
    [(case, layout) for case in CONV for layout in LAYOUTS[len(CONV[case][0])]],
)
def test_patch_norm(case, layout, form, dtype, monkeypatch):
    shape, weight_shape, *settings = CONV[case]
    x, weight, bias = tensors(shape, weight_shape, weight_shape[:1], dtype=dtype)
    x = x.to(memory_format=layout)

    def function(x, weight, bias):
        return functional.patch_norm_conv(x, weight, bias, *settings, form=form)

    g = torch.randn_like(function(x, weight, bias))
    check(function, [x, weight / weight[0].numel() ** 0.5, bias], g, monkeypatch)


@pytest.mark.parametrize("form", ["proportional", "disproportional"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LINEAR)
def test_gradient_only(shape, dtype, form, monkeypatch):
    n_in, n_out = LINEAR[shape]
    x, weight, bias, g = tensors((300, n_in), (n_out, n_in), (n_out,), (300, n_out), dtype=dtype)

    def function(x, weight, bias):
        return functional.gradient_only_linear(x, weight, bias, form=form)

    check(function, [x, weight / n_in**0.5, bias], g, monkeypatch)


def both_maps(x, weight, bias):
    z = functional.affine_like_linear(x, weight, bias)
    return z.sum() + functional.patch_norm_conv(x.view(-1, 8, 12), weight.view(-1, 8, 12)).sum()


def test_two_runs_agree_bit_by_bit():
    inputs = tensors((4096, 96), (50, 96), (50,), dtype=torch.bfloat16)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        one, other = (results(both_maps, inputs, torch.ones((), device="cuda")) for _ in range(2))
    for first, second in zip(one, other, strict=True):
        assert torch.equal(first, second)


def test_a_graph_can_be_captured():
    x, weight, bias = tensors((256, 96), (50, 96), (50,), dtype=torch.float32)
    one = torch.ones((), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(both_maps, [x, weight, bias], one)  # compiles what capture must not compile
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(both_maps, [x, weight, bias], one)
    x.copy_(torch.randn_like(x))
    graph.replay()
    for replayed, expected in zip(
        captured, results(both_maps, [x, weight, bias], one), strict=True
    ):
        torch.testing.assert_close(replayed, expected)


def test_autocast():
    x, weight, bias = tensors((256, 96), (50, 96), (50,), dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        z = functional.affine_like_linear(x.requires_grad_(), weight, bias)
    assert z.dtype == torch.bfloat16
    (dx,) = torch.autograd.grad(z.sum(), x)
    assert dx.dtype == torch.float32
    expected = functional.affine_like_linear(
        *(t.detach().cpu().double() for t in (x, weight, bias))
    )
    assert error(z.cpu(), expected) < 1e-2


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # Inductor would like it allowed
@pytest.mark.parametrize("rows", [100, 16384])
def test_compiled_gradients(rows):
    x, weight, bias, g = tensors((rows, 96), (50, 96), (50,), (rows, 50), dtype=torch.float32)
    eager = results(functional.affine_like_linear, [x, weight, bias], g)
    compiled = results(torch.compile(functional.affine_like_linear), [x, weight, bias], g)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)

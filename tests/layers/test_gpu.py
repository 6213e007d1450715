"""On a GPU: kernels agree with float64, and properties that an interpreter cannot show."""

from functools import partial

import pytest
import torch
from adiv_layers import functional
from adiv_layers.forms import Correction
from adiv_layers.kernels import choice, launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LINEAR = {  # (n_in, n_out)
    "wide output": (96, 200),
    "odd": (101, 67),
    "odd, more inputs than rows": (1001, 667),
    "narrow output": (2048, 333),
}
CONV = {  # (input, weight, stride, padding, dilation, groups)
    "2d": ((4, 32, 17, 16), (48, 32, 3, 3), 1, 1, 1, 1),
    "2d mixed": ((3, 5, 19, 21), (7, 5, 3, 3), 2, 1, 2, 1),
    "2d groups": ((2, 32, 9, 9), (64, 16, 3, 3), 1, 1, 1, 2),
    "2d 7×7": ((8, 64, 7, 7), (64, 64, 3, 3), 1, 1, 1, 1),
    "2d 14×14": ((8, 64, 14, 14), (32, 64, 3, 3), 1, 1, 1, 1),
    "1d": ((4, 12, 100), (9, 12, 5), 2, 2, 1, 1),
    "3d": ((2, 6, 7, 8, 9), (5, 6, 3, 3, 3), 1, 1, 1, 1),
}


@pytest.fixture(autouse=True)
def _exact_single_precision():
    """Disable TF32 in convolutions; in matrix products it is off by default."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def results(function, inputs, g):
    """Return the output and the gradients of all inputs."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    z = function(*inputs)
    return [z, *torch.autograd.grad(z, inputs, g.to(z.dtype))]


def error(actual, expected):
    """Return the relative 2-norm of the difference, with 0/0 = 0."""
    difference = (actual.double() - expected).norm()
    return (difference / expected.norm()).item() if difference != 0 else 0.0


def check(function, inputs, g, monkeypatch):
    """Assert errors of at most thrice the plain expression's, both against float64 on the CPU.

    The upstream gradients get a nonzero mean: otherwise the bias's gradient, a sum of random signs,
    would be dominated by rounding.
    """
    g += 1
    truth = results(function, [t.cpu().double() for t in inputs], g.cpu().double())
    found = results(function, inputs, g)
    with monkeypatch.context() as patch:
        patch.setattr(choice, "DEVICES", set())
        plain = results(function, inputs, g)
    for i, (actual, usual, expected) in enumerate(zip(found, plain, truth, strict=True)):
        assert actual.dtype == usual.dtype
        allowed = 3 * max(error(usual.cpu(), expected), torch.finfo(actual.dtype).eps)
        assert error(actual.cpu(), expected) <= allowed, f"result {i}"


def tensors(*shapes, dtype):
    return [torch.randn(s, device="cuda").to(dtype) for s in shapes]


def test_triton_works_here():
    """Triton works: a kernel that does not start raises here, where a layer would fall back."""
    x = torch.ones(2, 3, device="cuda")
    kernels = choice.kernels_for(x)
    kernels.UnitRows.apply(x, Correction(1.0, 1.0, 1.0, 1.0), torch.float32)


LINEAR_MAPS = {
    "affine-like": functional.affine_like_linear,
    "norm-like": functional.norm_like_linear,
    "proportional": partial(functional.gradient_only_linear, form="proportional"),
    "disproportional": partial(functional.gradient_only_linear, form="disproportional"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LINEAR)
@pytest.mark.parametrize("name", LINEAR_MAPS)
def test_linear(name, shape, dtype, monkeypatch):
    n_in, n_out = LINEAR[shape]
    x, weight, bias, g = tensors((300, n_in), (n_out, n_in), (n_out,), (300, n_out), dtype=dtype)
    check(LINEAR_MAPS[name], [x, weight / n_in**0.5, bias], g, monkeypatch)


FORMS = [
    *(("affine_like_linear", a, b) for a, b in ((2, 0.5), (2, 0.3), (-1, 2), (1, 1e-3))),
    *(("norm_like_linear", a, b) for a, b in ((0.5**0.5, 0.5**0.5), (-2, 1), (1, 0), (-1, -0.9))),
]


@pytest.mark.parametrize(("name", "alpha", "beta"), FORMS)
@pytest.mark.parametrize("shape", [(33, 64, 48), (300, 96, 200), (50, 700, 600), (90, 900, 100)])
def test_alpha_and_beta_over_their_range(shape, name, alpha, beta, monkeypatch):
    """All ranges of α and β: few rows, bias as a column or added, divided output, any length."""
    rows, n_in, n_out = shape
    x, weight, bias, g = tensors(
        (rows, n_in), (n_out, n_in), (n_out,), (rows, n_out), dtype=torch.float32
    )
    x *= torch.logspace(-3, 1, rows, device="cuda")[:, None]

    def function(x, weight, bias):
        return getattr(functional, name)(x, weight, bias, alpha=alpha, beta=beta)

    check(function, [x, weight / n_in**0.5, bias], g, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("shape", [(32, 3072, 32), (32, 32, 10), (64, 512, 512), (5, 101, 33)])
@pytest.mark.parametrize("name", ["affine_like_linear", "norm_like_linear"])
def test_few_rows_by_a_small_weight(name, shape, dtype, monkeypatch):
    rows, n_in, n_out = shape
    x, weight, bias, g = tensors((rows, n_in), (n_out, n_in), (n_out,), (rows, n_out), dtype=dtype)
    check(getattr(functional, name), [x, weight / n_in**0.5, bias], g, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [1, 2, 4])
def test_unaligned_slices(start, dtype, monkeypatch):
    x, weight, bias, g = tensors((300, 112), (80, 112), (90,), (300, 90), dtype=dtype)
    x, weight = x[:, start : start + 96], weight[:, start : start + 96]
    check(
        functional.affine_like_linear,
        [x, weight, bias[start : start + 80]],
        g[:, start : start + 80],
        monkeypatch,
    )


@pytest.mark.parametrize("n_in", [64, 1000, 1001, 4096, 20000, 65536])
def test_rows_of_every_width(n_in, monkeypatch):
    x, weight, g = tensors((33, n_in), (8, n_in), (33, 8), dtype=torch.float32)

    def unit_then_linear(x, weight):
        return functional.l2_norm(x) @ weight.t()

    check(unit_then_linear, [x, weight], g, monkeypatch)


# By number of dimensions; torch has one layout for sequences.
LAYOUTS = {
    3: [torch.contiguous_format],
    4: [torch.contiguous_format, torch.channels_last],
    5: [torch.contiguous_format, torch.channels_last_3d],
}


PATCH_MAPS = [
    ("patch_norm_conv", form, dtype) for form in ("affine-like", "norm-like") for dtype in DTYPES
]
PATCH_MAPS += [
    ("gradient_only_conv", form, torch.float32) for form in ("proportional", "disproportional")
]


@pytest.mark.parametrize(("name", "form", "dtype"), PATCH_MAPS)
@pytest.mark.parametrize(
    ("case", "layout"), [(case, layout) for case in CONV for layout in LAYOUTS[len(CONV[case][0])]]
)
def test_convolutions(case, layout, name, form, dtype, monkeypatch):
    shape, weight_shape, *settings = CONV[case]
    x, weight, bias = tensors(shape, weight_shape, weight_shape[:1], dtype=dtype)
    x = x.to(memory_format=layout)

    def function(x, weight, bias):
        return getattr(functional, name)(x, weight, bias, *settings, form=form)

    g = torch.randn_like(function(x, weight, bias))
    check(function, [x, weight / weight[0].numel() ** 0.5, bias], g, monkeypatch)


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
        results(both_maps, [x, weight, bias], one)  # compiles what a capture cannot
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


def test_a_graph_captured_without_warm_up_is_right_and_says_that_it_is_plain(monkeypatch):
    monkeypatch.setattr(launch, "_broken", set())
    x, weight, bias = tensors((70, 179), (131, 179), (131,), dtype=torch.float16)
    expected = torch.nn.functional.linear(x, weight)  # warms cuBLAS up, but not the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # An eps of its own specialises kernels that nothing has loaded before.
    with pytest.warns(RuntimeWarning, match="before the capture"), torch.cuda.graph(graph):
        captured = functional.norm_like_linear(x, weight, bias, eps=1.2345e-3)
    graph.replay()
    expected = expected.float() / x.float().norm(dim=1, keepdim=True) + bias
    torch.testing.assert_close(captured.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
@pytest.mark.parametrize("rows", [40, 300])
def test_the_device_is_that_of_the_tensors_not_the_current_one(rows):
    x, weight, bias, g = tensors((rows, 96), (50, 96), (50,), (rows, 50), dtype=torch.float32)
    here = results(functional.affine_like_linear, [x, weight, bias], g)
    there = results(
        functional.affine_like_linear, [t.to("cuda:1") for t in (x, weight, bias)], g.to("cuda:1")
    )
    assert torch.cuda.current_device() == 0
    for one, other in zip(here, there, strict=True):
        assert other.device.index == 1
        torch.testing.assert_close(one, other.to("cuda:0"))


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # Inductor recommends TF32
@pytest.mark.parametrize("rows", [100, 16384])
def test_compiled_gradients(rows):
    x, weight, bias, g = tensors((rows, 96), (50, 96), (50,), (rows, 50), dtype=torch.float32)
    eager = results(functional.affine_like_linear, [x, weight, bias], g)
    compiled = results(torch.compile(functional.affine_like_linear), [x, weight, bias], g)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)

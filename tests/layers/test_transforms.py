"""torch.compile, export, `torch.func`, forward mode and autocast all agree with plain eager."""

import pytest
import torch
import torch.fx
from adiv_layers import (
    AffineLikeLinear,
    CorrectedMultiheadAttention,
    GradientOnlyConv2d,
    GradientOnlyLinear,
    NormLikeLinear,
    PatchNormConv2d,
)
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

# On a GPU wide rows take the path that scales the output, others the one that scales the input.
LINEAR = {
    "affine-like": lambda: AffineLikeLinear(5, 4, dtype=torch.float64),
    "affine-like, wide": lambda: AffineLikeLinear(5, 1, dtype=torch.float64),
    "norm-like": lambda: NormLikeLinear(5, 4, dtype=torch.float64),
    "norm-like, wide": lambda: NormLikeLinear(5, 1, dtype=torch.float64),
    "gradient-only": lambda: GradientOnlyLinear(5, 4, dtype=torch.float64),
    "batch": lambda: GradientOnlyLinear(5, 4, form="batch", dtype=torch.float64),
}
CONVOLUTION = {
    "patch norm": lambda: PatchNormConv2d(2, 4, 3, groups=2, padding=1, dtype=torch.float64),
    "patch, norm-like": lambda: PatchNormConv2d(2, 4, 3, form="norm-like", dtype=torch.float64),
    "gradient-only convolution": lambda: GradientOnlyConv2d(2, 4, 3, dtype=torch.float64),
}
LAYERS = LINEAR | CONVOLUTION
GRADIENT_ONLY = ("gradient-only", "batch", "gradient-only convolution")
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def sample(make, rows=3):
    shape = (2, 5, 5) if make in CONVOLUTION.values() else (5,)
    return torch.randn(rows, *shape, dtype=torch.float64)


def gradients(module, x):
    """Return the output, then the gradients of x and of all parameters."""
    x = x.detach().clone().requires_grad_()
    output = module(x)
    wanted = (x, *module.parameters())
    return output, *torch.autograd.grad(output.square().sum(), wanted)


def close(actual, expected, tolerance=1e-10):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@each_layer
def test_vmap_of_forward_and_of_per_sample_gradients(make):
    module, x = make(), sample(make)
    close([vmap(module)(x[:, None])[:, 0]], [module(x)])

    def loss(parameters, row):
        return functional_call(module, parameters, row[None]).square().sum()

    per_sample = vmap(grad(loss), (None, 0))(dict(module.named_parameters()), x)
    for index in range(len(x)):
        _, _, *expected = gradients(module, x[index : index + 1])
        close([g[index] for g in per_sample.values()], expected)


# A warning of torch's own, from the decompositions of its forward mode.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in GRADIENT_ONLY])
def test_forward_mode(name):
    make = LAYERS[name]
    module, x = make(), sample(make)
    module.requires_grad_(False)
    tangent, step = torch.randn_like(x), 1e-6
    output, derivative = jvp(module, (x,), (tangent,))
    finite = (module(x + step * tangent) - module(x - step * tangent)) / (2 * step)
    close([output, derivative], [module(x), finite], tolerance=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_layer
def test_autocast(make, dtype):
    module, x = make().float(), sample(make, rows=64).float()
    expected = gradients(module, x)
    with torch.autocast("cpu", dtype):
        output = module(x)
        again = module(x.to(dtype))
    assert output.dtype == again.dtype == dtype
    with torch.autocast("cpu", dtype):
        actual = gradients(module, x)
    assert [t.dtype for t in actual[1:]] == [torch.float32] * (len(actual) - 1)
    for one, other in zip(actual, expected, strict=True):
        error = (one - other).norm() / other.norm()
        assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.slow(one_in=4)
@each_layer
def test_export(make):
    module, x = make().eval(), sample(make)
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: rows},)).module()
    more = torch.cat([x, x])
    close([exported(x), exported(more)], [module(x), module(more)])


@each_layer
def test_symbolic_trace(make):
    module, x = make(), sample(make)
    close(gradients(torch.fx.symbolic_trace(module), x), gradients(module, x))


COMPILED = {
    "linear": lambda: nn.Sequential(
        *(AffineLikeLinear(24, 5), nn.ReLU(), NormLikeLinear(5, 24), nn.Tanh()),
        *(NormLikeLinear(24, 5, beta=0.5), AffineLikeLinear(5, 4, alpha=2.0)),
    ),
    "gradient-only": lambda: nn.Sequential(
        GradientOnlyLinear(24, 5), nn.ReLU(), GradientOnlyLinear(5, 4, form="disproportional")
    ),
    "batch": lambda: GradientOnlyLinear(24, 3, form="batch"),
    "convolution": lambda: nn.Sequential(
        *(nn.Unflatten(1, (2, 3, 4)), PatchNormConv2d(2, 4, 2, groups=2), nn.ReLU()),
        *(PatchNormConv2d(4, 2, 2, form="norm-like"), GradientOnlyConv2d(2, 2, 1)),
    ),
}


# aot_eager traces forward and backward like the default backend but generates no code, so it is
# fast.
@pytest.mark.slow
@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_compile_of_every_layer(make):
    module = make()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 9):
        x = torch.randn(rows, 24)
        close(gradients(compiled, x), gradients(module, x), tolerance=1e-4)


@pytest.mark.slow
def test_compile_of_attention():
    module = CorrectedMultiheadAttention(8, 2, batch_first=True, qk_norm=True)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (4, 6):
        x = torch.randn(2, length, 8)
        output, _ = compiled(x, x, x, need_weights=False, is_causal=True)
        close([output], module(x, x, x, need_weights=False, is_causal=True)[:1], tolerance=1e-4)


def test_export_and_transforms_of_attention():
    module = CorrectedMultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    exported = torch.export.export(module, (x, x, x)).module()
    close(exported(x, x, x), module(x, x, x))
    close([vmap(lambda row: module(row, row, row)[0])(x)], [module(x, x, x)[0]])
    with torch.autocast("cpu", torch.bfloat16):
        assert module.float()(x.float(), x.float(), x.float())[0].dtype == torch.bfloat16

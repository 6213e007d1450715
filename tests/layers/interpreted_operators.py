"""The operators as PyTorch sees them, and when the kernels are left alone."""

import sys

import pytest
import torch
from adiv_layers import functional, ops
from adiv_layers.kernels import channels, functions, launch, library, patch, rows
from adiv_layers.kernels.maps import columns
from interpreted import BFLOAT16, FLOAT32, plain
from torch.autograd import forward_ad

X, G, B = torch.randn(6, 20), torch.randn(6, 10), torch.randn(10)
R = torch.rand(6, 1)
VOLUME = torch.randn(2, 4, 1, 5, 6)
GEOMETRY = [1, 3, 3, 1, 2, 1, 0, 1, 1, 1, 1, 1]
CALLS = [
    (library.unit_rows, (X, 1.0, 1e-24, BFLOAT16, False)),
    (library.unit_rows, (X[:, ::2], 0.0, 1e-24, FLOAT32, True)),
    (library.unit_rows, (X[:0], 1.0, 1e-24, FLOAT32, False)),
    (library.row_factor, (X, 1.0, 1e-24, False)),
    (library.unit_rows_backward, (X, X, R, R, 0.0, True, FLOAT32)),
    (library.unit_rows_backward, (X.t(), X.t(), X[:1].t(), None, 1e12, False, FLOAT32)),
    (library.gate, (columns(G), R.view(1, 1, -1), columns(G), True, True, True, 0.0, True)),
    (library.gate, (columns(G), R.view(1, 1, -1), None, True, False, False, 0.0, True)),
    (library.gate, (columns(G)[..., :0], R.view(1, 1, -1)[..., :0], None, False, True, False, 0.0,
                    False)),
    (library.gate, (VOLUME.flatten(2), torch.rand(2, 2, 30), VOLUME.flatten(2), True, True, True,
                    5.0, True)),
    (library.scale_, (columns(G).clone(), columns(G), R.view(1, 1, -1), B)),
    (library.add_, (columns(G).clone(), R.view(1, 1, -1), columns(G), -1.0)),
    (library.patch_factor, (VOLUME, 2, GEOMETRY, 0.0, 1e-24)),
    (library.box_transposed, (torch.randn(2, 2, 1, 3, 6), [1, 5, 6], GEOMETRY)),
]  # fmt: skip


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_operator_is_what_its_schema_and_shape_function_say(call):
    operator, arguments = CALLS[call]
    torch.library.opcheck(operator, arguments)


def uses_kernels(x):
    """Whether x takes part in the kernels' autograd function."""
    unit, _ = ops.unit_rows(x, 1.0)
    return isinstance(unit.grad_fn, functions.UnitRows._backward_cls)


def test_kernels_are_used_on_plain_tensors_and_parameters():
    assert uses_kernels(torch.randn(2, 3, requires_grad=True))
    assert uses_kernels(torch.nn.Parameter(torch.randn(2, 3)))
    with plain():
        assert not uses_kernels(torch.randn(2, 3, requires_grad=True))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "x",
    [torch.randn(0, 3), torch.randn(2, 0), torch.randn(2, 3).as_subclass(Subclass)],
    ids=["no rows", "no columns", "subclass"],
)
def test_kernels_leave_other_tensors_alone(x):
    assert not uses_kernels(x.requires_grad_())


# PyTorch's own forward mode loads its rules through what it has itself deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_kernels_leave_transforms_alone():
    x = torch.randn(4, 3)

    def total(x):
        unit, r = ops.unit_rows(x, 1.0)
        return unit.sum() + r.sum()

    expected = torch.autograd.grad(total(y := x.clone().requires_grad_()), y)[0]
    torch.testing.assert_close(torch.func.grad(total)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(x), expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(total(dual)).tangent
    torch.testing.assert_close(tangent, expected.sum())


def test_gradients_may_be_mapped_over():
    x = torch.randn(4, 3, requires_grad=True)
    unit, r = ops.unit_rows(x, 1.0)
    u, gamma = torch.randn(5, 4, 3), torch.randn(5, 4, 1)
    (batched,) = torch.autograd.grad((unit, r), x, (u, gamma), True, is_grads_batched=True)
    for i in range(5):
        (one,) = torch.autograd.grad((unit, r), x, (u[i], gamma[i]), True)
        torch.testing.assert_close(batched[i], one)


def test_compiled_code_sees_plain_expressions():
    x = torch.randn(4, 3, requires_grad=True)
    names = []

    def backend(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(ops.unit_rows, backend=backend, fullgraph=True)(x, 1.0)
    assert names and not any("adiv_layers" in name for name in names)


@pytest.fixture
def forgetful(monkeypatch):
    """Whatever fails inside is forgotten after it."""
    monkeypatch.setattr(launch, "_broken", set())
    monkeypatch.setattr(launch, "_told", set())
    functions._importable.cache_clear()
    yield
    functions._importable.cache_clear()


def test_without_triton_all_is_plain_and_said_once(monkeypatch, forgetful):
    with plain():
        expected = ops.unit_rows(X, 1.0)
    for name in [n for n in sys.modules if n.split(".")[0] == "triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "adiv_layers.kernels.rows")
    monkeypatch.delattr(sys.modules["adiv_layers.kernels"], "rows")
    with pytest.warns(RuntimeWarning, match="no Triton kernels"):
        assert not uses_kernels(X.clone().requires_grad_())
    for actual, plainly in zip(ops.unit_rows(X, 1.0), expected, strict=True):
        assert torch.equal(actual, plainly)


class Broken:
    """A kernel that a broken Triton cannot compile."""

    def __getitem__(self, grid):
        raise RuntimeError("Failed to find C compiler")


KERNELS = [
    (rows, "unit_rows_kernel"),
    (rows, "unit_rows_backward_kernel"),
    (channels, "gate_kernel"),
    (channels, "blend_kernel"),
    (channels, "square_sum_kernel"),
    (patch, "box_kernel"),
    (patch, "box_transposed_kernel"),
]


@pytest.mark.parametrize(("module", "kernel"), KERNELS, ids=[name for _, name in KERNELS])
def test_whatever_kernel_is_broken_the_results_are_the_plain_ones(
    module, kernel, monkeypatch, forgetful
):
    """All maps once with kernels that fail in the forward or only in the backward pass."""
    narrow, wide = torch.randn(2, 100), torch.randn(33, 100)
    images, filters = torch.randn(2, 100).view(2, 4, 5, 5), torch.randn(8, 4, 3, 3)

    def everything(x, images):
        weights = [t.clone().requires_grad_() for t in (narrow, wide, filters, wide)]
        biases = [torch.ones(len(w), requires_grad=True) for w in weights]
        total = functional.l2_norm(x).relu().sum()
        for form in (functional.affine_like_linear, functional.norm_like_linear):
            for weight, bias in list(zip(weights, biases, strict=True))[:2]:
                total = total + form(x, weight, bias).square().sum()
        total = total + functional.patch_norm_conv(images, weights[2], biases[2]).square().sum()
        total = total + functional.gradient_only_linear(x, weights[3], biases[3]).square().sum()
        return torch.autograd.grad(total, [x, images, *weights, *biases])

    inputs = [torch.randn(5, 100, requires_grad=True), images.requires_grad_()]
    with plain():
        expected = everything(*inputs)
    monkeypatch.setattr(module, kernel, Broken())
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        found = everything(*inputs)
    for actual, plainly in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, plainly, rtol=1e-4, atol=1e-4)

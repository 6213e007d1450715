"""When the kernels are used, when they are not, and what happens without them."""

import sys

import pytest
import torch
from adiv_layers import functional, ops
from adiv_layers.forms import Correction
from adiv_layers.kernels import (
    channels,
    choice,
    functions,
    launch,
    patch,
    rows,
    small,
    small_linear,
)
from interpreted import plain
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

X = torch.randn(6, 20)
UNIT = Correction(1.0, 1.0, 1.0, 1.0)


def uses_kernels(x):
    """Whether x passes through the kernels' autograd function."""
    unit, _ = ops.unit_rows(x, UNIT)
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


# PyTorch's own forward mode uses functions that PyTorch has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_kernels_leave_transforms_alone():
    x = torch.randn(4, 3)

    def total(x):
        unit, r = ops.unit_rows(x, UNIT)
        return unit.sum() + r.sum()

    expected = torch.autograd.grad(total(y := x.clone().requires_grad_()), y)[0]
    torch.testing.assert_close(torch.func.grad(total)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(x), expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(total(dual)).tangent
    torch.testing.assert_close(tangent, expected.sum())


def test_dispatch_modes_see_plain_expressions():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names = []
    with Seen():
        ops.unit_rows(torch.randn(4, 3), UNIT)
    assert "aten.rsqrt.default" in names


@pytest.fixture
def forgetful(monkeypatch):
    """Discard all recorded kernel failures after the test."""
    monkeypatch.setattr(launch, "_broken", set())
    choice._functions.cache_clear()
    yield
    choice._functions.cache_clear()


def test_without_triton_all_is_plain_and_said_once(monkeypatch, forgetful):
    with plain():
        expected = ops.unit_rows(X, UNIT)
    for name in [n for n in sys.modules if n.split(".")[0] == "triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("functions", "rows"):
        monkeypatch.delitem(sys.modules, f"adiv_layers.kernels.{name}")
        monkeypatch.delattr(sys.modules["adiv_layers.kernels"], name)
    with pytest.warns(RuntimeWarning, match="no Triton kernels"):
        assert not uses_kernels(X.clone().requires_grad_())
    for actual, plainly in zip(ops.unit_rows(X, UNIT), expected, strict=True):
        assert torch.equal(actual, plainly)


class Broken:
    """A kernel that a broken Triton installation cannot compile."""

    def __getitem__(self, grid):
        raise RuntimeError("Failed to find C compiler")


KERNELS = [
    (rows, "unit_rows_kernel"),
    (rows, "unit_rows_backward_kernel"),
    (rows, "pack_kernel"),
    (channels, "gate_kernel"),
    (channels, "add_up_kernel"),
    (channels, "blend_kernel"),
    (channels, "square_sum_kernel"),
    (patch, "box_kernel"),
    (patch, "box_transposed_kernel"),
    (small, "forward_kernel"),
    (small, "finish_kernel"),
    (small, "backward_kernel"),
]


@pytest.mark.slow(one_in=12)
@pytest.mark.parametrize(("module", "kernel"), KERNELS, ids=[name for _, name in KERNELS])
def test_whatever_kernel_is_broken_the_results_are_the_plain_ones(
    module, kernel, monkeypatch, forgetful
):
    """Every map is right with a kernel that fails in the forward or only in the backward pass."""
    monkeypatch.setattr(small_linear, "_NUMBERS", 300)  # so that larger inputs take the other ways
    shapes = {"tiny": (2, 100), "wide": (33, 100), "narrow": (7, 100), "tall": (30, 20)}
    weights = {k: torch.randn(s, requires_grad=True) for k, s in shapes.items()}
    weights["split"] = torch.randn(1, 300, requires_grad=True)
    filters = torch.randn(8, 4, 3, 3, requires_grad=True)
    rows_of = {k: torch.randn(40, w.shape[1], requires_grad=True) for k, w in weights.items()}
    images = torch.randn(2, 4, 5, 5, requires_grad=True)
    biases = {k: torch.randn(len(w), requires_grad=True) for k, w in weights.items()}
    leaves = [*weights.values(), *rows_of.values(), *biases.values(), filters, images]

    def everything():
        total = functional.l2_norm(rows_of["wide"]).relu().sum()
        for name, weight in weights.items():
            for form in (functional.affine_like_linear, functional.norm_like_linear):
                total = total + form(rows_of[name], weight, biases[name]).square().sum()
        total = total + functional.patch_norm_conv(images, filters).square().sum()
        total = total + functional.gradient_only_conv(images, filters).square().sum()
        x, weight, bias = (kind["wide"] for kind in (rows_of, weights, biases))
        total = total + functional.gradient_only_linear(x, weight, bias).square().sum()
        return torch.autograd.grad(total, leaves)

    with plain():
        expected = everything()
    monkeypatch.setattr(module, kernel, Broken())
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        found = everything()
    for actual, plainly in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, plainly, rtol=1e-4, atol=1e-3)

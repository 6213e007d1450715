"""The layers as modules: twins in constructor, in state and in every use of a module by torch."""

import copy
import inspect
import io

import pytest
import torch
from adiv_layers import (
    AffineLikeLinear,
    GradientOnlyConv2d,
    GradientOnlyLinear,
    L2Norm,
    NormLikeLinear,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
)
from computes import Computes
from torch import nn

LAYERS = [
    (AffineLikeLinear, (5, 4), {"alpha": 2.0, "beta": 0.5}, (2, 5)),
    (NormLikeLinear, (5, 4), {"beta": 0.5, "eps": 1e-6}, (2, 5)),
    (GradientOnlyLinear, (5, 4), {"form": "batch", "damping": 0.1}, (2, 5)),
    (PatchNormConv1d, (2, 4, 3), {"form": "norm-like"}, (2, 2, 6)),
    (PatchNormConv2d, (2, 4, 3), {"alpha": 0.5}, (2, 2, 6, 6)),
    (PatchNormConv3d, (2, 4, 2), {"beta": 2.0}, (2, 2, 3, 4, 4)),
    (GradientOnlyConv2d, (2, 4, 3), {"form": "disproportional"}, (2, 2, 6, 6)),
]
each_layer = pytest.mark.parametrize(
    ("layer", "sizes", "settings", "shape"), LAYERS, ids=[case[0].__name__ for case in LAYERS]
)


def twin_of(layer):
    return next(base for base in layer.__mro__ if base.__module__.startswith("torch.nn"))


@each_layer
def test_constructor_is_the_twins_then_keywords(layer, sizes, settings, shape):
    own = list(inspect.signature(layer).parameters.values())
    twin = list(inspect.signature(twin_of(layer)).parameters.values())
    assert [(p.name, p.default) for p in own[: len(twin)]] == [(p.name, p.default) for p in twin]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in own[len(twin) :])
    assert set(settings) <= {p.name for p in own[len(twin) :]}


@each_layer
def test_state_and_first_weights_are_the_twins(layer, sizes, settings, shape):
    twin = twin_of(layer)
    torch.manual_seed(1)
    ours = layer(*sizes, **settings)
    torch.manual_seed(1)
    theirs = twin(*sizes)
    assert isinstance(ours, twin)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    torch.manual_seed(1)
    ours.reset_parameters()
    assert torch.equal(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert layer(*sizes, bias=False).bias is None


@each_layer
def test_copies_and_pickles(layer, sizes, settings, shape):
    original, x = layer(*sizes, **settings), torch.randn(shape)
    stored = io.BytesIO()
    torch.save(original, stored)
    stored.seek(0)
    for other in (copy.deepcopy(original), torch.load(stored, weights_only=False)):
        assert repr(other) == repr(original)
        assert torch.equal(other(x), original(x))
        assert other.weight is not original.weight


@each_layer
def test_meta_device(layer, sizes, settings, shape):
    empty = layer(*sizes, **settings, device="meta")
    expected = layer(*sizes, **settings)
    assert empty(torch.randn(shape, device="meta")).shape == expected(torch.randn(shape)).shape
    empty.to_empty(device="cpu").load_state_dict(expected.state_dict())
    x = torch.randn(shape)
    assert torch.equal(empty(x), expected(x))


@each_layer
def test_parametrize(layer, sizes, settings, shape):
    plain, x = layer(*sizes, **settings), torch.randn(shape)
    doubled = copy.deepcopy(plain)
    nn.utils.parametrize.register_parametrization(
        doubled, "weight", Computes(lambda m, weight: 2 * weight)
    )
    with torch.no_grad():
        plain.weight *= 2
    torch.testing.assert_close(doubled(x), plain(x))
    doubled(x).sum().backward()
    assert doubled.parametrizations.weight.original.grad is not None


@each_layer
def test_the_settings_reach_the_formula(layer, sizes, settings, shape):
    torch.manual_seed(1)
    default = layer(*sizes)
    torch.manual_seed(1)
    changed = layer(*sizes, **settings)
    x = torch.randn(shape)
    outcomes = []
    for module in (default, changed):
        output = module(x)
        output.sum().backward()
        outcomes.append(torch.cat([output.flatten(), module.weight.grad.flatten()]))
    assert not torch.allclose(*outcomes)


def test_l2_norm():
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(L2Norm(1)(x).norm(dim=1), torch.ones(2, 4, 4))
    torch.testing.assert_close(L2Norm()(x).norm(dim=-1), torch.ones(2, 3, 4))
    assert repr(L2Norm(1)) == "L2Norm(dim=1, eps=1e-12)"
    assert not list(L2Norm().parameters())


@pytest.mark.parametrize("layer", [AffineLikeLinear, NormLikeLinear, L2Norm])
def test_complex_inputs_are_refused(layer):
    """Torch would drop the imaginary part."""
    made = layer() if layer is L2Norm else layer(3, 2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="must be real"):
        made(torch.randn(4, 3, dtype=torch.complex64))


def test_an_eps_of_zero_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        L2Norm(eps=0)

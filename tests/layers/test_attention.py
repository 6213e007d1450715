"""Corrected attention: equal to its twin if every form is standard, and its own features."""

import copy
import io
import itertools
import math

import pytest
import torch
from adiv_layers import AffineLikeLinear, CorrectedMultiheadAttention, NormLikeLinear
from adiv_layers.functional import affine_like_linear
from torch import nn
from torch.nn.utils import prune

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
STANDARD = dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), "standard")
OPTIONS = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 5, "vdim": 7, "batch_first": True},
    {"kdim": 5, "bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "add_bias_kv": True, "batch_first": True},
]


def pair(**options):
    """Return a twin with nonzero biases, and the all-standard layer with the same state."""
    twin = nn.MultiheadAttention(8, 2, **options, dtype=torch.float64)
    for parameter in twin.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer = CorrectedMultiheadAttention(8, 2, **options, **STANDARD, dtype=torch.float64)
    layer.load_state_dict(twin.state_dict())
    return twin, layer


def inputs(twin, batched=True, queries=4, keys=6):
    lengths, widths = (queries, keys, keys), (8, twin.kdim, twin.vdim)
    shapes = zip(lengths, widths, strict=True)
    if not batched:
        return [torch.randn(n, w, dtype=torch.float64) for n, w in shapes]
    return [
        torch.randn(*((3, n) if twin.batch_first else (n, 3)), w, dtype=torch.float64)
        for n, w in shapes
    ]


def masks(batched):
    hidden = torch.zeros(4, 6, dtype=torch.bool)
    hidden[0, 2:] = hidden[3, 1] = True
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    padding = padding if batched else padding[1]
    added = torch.randn(4, 6, dtype=torch.float64)
    yield {}
    yield {"attn_mask": hidden}
    yield {"attn_mask": added}
    yield {"key_padding_mask": padding}
    yield {"attn_mask": hidden, "key_padding_mask": padding}
    yield {"attn_mask": added, "key_padding_mask": padding.double() * -3}
    yield {"attn_mask": torch.randn(6 if batched else 2, 4, 6, dtype=torch.float64)}


def assert_same(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], **TIGHT)
    assert (actual[1] is None) == (expected[1] is None)
    if actual[1] is not None:
        torch.testing.assert_close(actual[1], expected[1], **TIGHT)


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_standard_equals_the_twin(options, batched):
    twin, layer = pair(**options)
    arguments = inputs(twin, batched)
    for training, mask in itertools.product((True, False), masks(batched)):
        twin.train(training)
        layer.train(training)
        for weights in (
            {"need_weights": False},
            {"need_weights": True},
            {"average_attn_weights": False},
        ):
            assert_same(layer(*arguments, **mask, **weights), twin(*arguments, **mask, **weights))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_causal(need_weights, padded):
    twin, layer = pair(batch_first=True)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[2, 3:] = True
    settings = {"need_weights": need_weights, "key_padding_mask": padding if padded else None}
    expected = twin(x, x, x, attn_mask=causal, **settings)
    assert_same(layer(x, x, x, attn_mask=causal, is_causal=True, **settings), expected)
    assert_same(layer(x, x, x, is_causal=True, **settings), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_dict_is_the_twins(options):
    twin, layer = pair(**options)
    assert list(layer.state_dict()) == list(twin.state_dict())
    fresh = nn.MultiheadAttention(8, 2, **options, dtype=torch.float64)
    fresh.load_state_dict(layer.state_dict())
    for name, value in twin.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})
    outer, inner = nn.Sequential(nn.ReLU(), twin), nn.Sequential(nn.ReLU(), layer)
    inner.load_state_dict(outer.state_dict())
    assert list(inner.state_dict()) == list(outer.state_dict())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_starts_from_the_twins_draws(options):
    torch.manual_seed(3)
    twin = nn.MultiheadAttention(8, 2, **options)
    after = torch.rand(1)
    torch.manual_seed(3)
    layer = CorrectedMultiheadAttention(8, 2, **options)
    assert torch.equal(torch.rand(1), after)
    for name, value in twin.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value)


def test_every_projection_is_a_module_that_hooks_see():
    layer = CorrectedMultiheadAttention(8, 2, k_proj="norm-like", v_proj="standard")
    kinds = {name: type(module) for name, module in layer.named_children()}
    assert kinds == {
        "q_proj": AffineLikeLinear,
        "k_proj": NormLikeLinear,
        "v_proj": nn.Linear,
        "out_proj": AffineLikeLinear,
    }
    seen = []
    for name, module in layer.named_children():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    x = torch.randn(4, 3, 8)
    layer(x, x, x)[0].sum().backward()
    assert seen == ["q_proj", "k_proj", "v_proj", "out_proj"]
    assert {name for name, p in layer.named_parameters() if p.grad is not None} == {
        f"{name}.{kind}" for name in kinds for kind in ("weight", "bias")
    }


def test_corrected_and_normalised_by_hand():
    layer = CorrectedMultiheadAttention(
        6, 2, batch_first=True, qk_norm=True, out_proj="standard", dtype=torch.float64
    )
    x = torch.randn(1, 5, 6, dtype=torch.float64)
    q, k, v = (
        affine_like_linear(x[0], p.weight, p.bias).chunk(2, 1)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    heads, weights = [], []
    for head in range(2):
        cosine = nn.functional.cosine_similarity(q[head][:, None], k[head][None], dim=-1)
        weights.append(torch.softmax(math.sqrt(3) * cosine, -1))
        heads.append(weights[-1] @ v[head])
    expected = layer.out_proj(torch.cat(heads, 1))
    for need_weights in (True, False):
        output, _ = layer(x, x, x, need_weights=need_weights)
        torch.testing.assert_close(output[0], expected, **TIGHT)
    _, actual = layer(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(actual[0], torch.stack(weights), **TIGHT)


def test_dropout_only_in_training():
    layer = CorrectedMultiheadAttention(8, 2, dropout=0.5)
    x = torch.randn(4, 3, 8)
    for need_weights in (True, False):
        layer.train()
        first, second = (layer(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert not torch.equal(first, second)
        layer.eval()
        first, second = (layer(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert torch.equal(first, second)


def test_copies_pickles_and_meta():
    layer = CorrectedMultiheadAttention(8, 2, qk_norm=True)
    x = torch.randn(4, 3, 8)
    expected = layer(x, x, x)[0]
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    for other in (copy.deepcopy(layer), torch.load(stored, weights_only=False)):
        assert torch.equal(other(x, x, x)[0], expected)
        assert list(other.state_dict()) == list(layer.state_dict())
        other.q_proj.weight.data.zero_()
        assert torch.equal(layer(x, x, x)[0], expected)
    empty = CorrectedMultiheadAttention(8, 2, qk_norm=True, device="meta")
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty(x, x, x)[0], expected)
    assert "qk_norm=True" in repr(layer)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="must be one of 'standard', 'affine-like'"):
        CorrectedMultiheadAttention(8, 2, q_proj="affine")
    layer = CorrectedMultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="all three"):
        layer(torch.randn(4, 8), torch.randn(4, 1, 8), torch.randn(4, 1, 8))
    x = torch.randn(4, 3, 8)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(4, 5\); must be \(4, 4\) or"):
        layer(x, x, x, attn_mask=torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"key_padding_mask has shape \(4, 3\); must be \(3, 4\)"):
        layer(x, x, x, key_padding_mask=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="batches of 3, 1 and 1 samples"):
        layer(x, x[:, :1], x[:, :1])


@pytest.mark.parametrize("change", ["weight norm", "pruning", "another module"])
def test_a_projection_that_is_changed_can_be_saved_and_loaded(change):
    """Then the entries of queries, keys and values have their own names."""

    def made():
        layer = CorrectedMultiheadAttention(8, 2)
        if change == "weight norm":
            nn.utils.parametrizations.weight_norm(layer.q_proj)
        elif change == "pruning":
            prune.l1_unstructured(layer.k_proj, "weight", 0.5)
        else:
            layer.v_proj = nn.Sequential(layer.v_proj)
        return layer

    one, other, x = made(), made(), torch.randn(3, 4, 8)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x, x, x)[0], other(x, x, x)[0])
    assert "in_proj_weight" not in one.state_dict()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_masks_of_integers_are_refused_as_by_the_twin(dtype, name):
    """Added to the scores, a 1 for padding would draw attention to it."""
    x = torch.randn(4, 4, 8)
    with pytest.raises(TypeError, match=rf"{name} has dtype {dtype}; must be torch\.bool"):
        CorrectedMultiheadAttention(8, 2)(x, x, x, **{name: torch.ones(4, 4, dtype=dtype)})

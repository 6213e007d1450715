"""Conversion of whole models: replaced modules, unchanged properties, and the way back."""

import copy

import pytest
import torch
from adiv_layers import (
    AffineLikeLinear,
    CorrectedMultiheadAttention,
    GradientOnlyConv2d,
    GradientOnlyLinear,
    NormLikeLinear,
    PatchNormConv2d,
    convert,
)
from torch import nn
from torchvision.models import vit_b_16

# What a linear layer and a convolution become.
TARGETS = {
    "affine-like": (AffineLikeLinear, PatchNormConv2d),
    "norm-like": (NormLikeLinear, PatchNormConv2d),
    "gradient-only": (GradientOnlyLinear, GradientOnlyConv2d),
    "gradient-only-disproportional": (GradientOnlyLinear, GradientOnlyConv2d),
    "gradient-only-batch": (GradientOnlyLinear, nn.Conv2d),
}


class Block(nn.Module):
    """One block in GPT-2's style, its head tied to the embedding."""

    def __init__(self, width=16, heads=2, tokens=11):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight
        self.heads = heads

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return self.head(x + self.narrow(nn.functional.gelu(self.widen(self.norm_2(x)))))


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 5),
    )


@pytest.mark.parametrize("to", TARGETS)
def test_gpt_block(to):
    model, tokens = Block(), torch.randint(11, (2, 7))
    before, parameters = model(tokens), dict(model.named_parameters())
    report = convert(model, to)
    assert set(report.swapped) == {"qkv", "project", "widen", "narrow", "head"}
    assert set(report.left) == {"embed", "norm_1", "norm_2"}
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert model.head.weight is model.embed.weight
    after = model(tokens)
    if to.startswith("gradient-only"):
        assert torch.equal(after, before)
    else:
        assert not torch.allclose(after, before)
    after.sum().backward()
    assert all(p.grad.isfinite().all() for p in parameters.values())
    report.revert()
    assert type(model.qkv) is nn.Linear
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("to", TARGETS)
def test_classes_forms_and_geometry(to):
    model, (linear, convolution) = small_cnn(), TARGETS[to]
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 6, 6)
    report = convert(model, to)
    assert type(model[5]) is linear
    assert type(model[0]) is type(model[3]) is convolution
    assert repr(twin[3]).partition("(")[2].rstrip(")") in repr(model[3])
    assert model[0].padding_mode == "reflect"
    if isinstance(model[0], PatchNormConv2d):
        assert model[0].form == to
    if to == "gradient-only-batch":
        assert report.left["0"] == "there is no gradient-only-batch Conv2d"
    assert model(x).shape == twin(x).shape
    fresh = linear(64, 5)
    fresh.load_state_dict(twin[5].state_dict())
    torch.testing.assert_close(model[5](x.flatten(1)[:, :64]), fresh(x.flatten(1)[:, :64]))


def test_mode_hooks_and_attributes_move_along():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).eval()
    seen = []
    handle = model[0].register_forward_hook(lambda *_: seen.append("hook"))
    model[0].note = "mine"
    report = convert(model, "affine-like")
    assert not model[0].training
    assert model[0].note == "mine"
    model(torch.randn(2, 3))
    assert seen == ["hook"]
    handle.remove()
    model(torch.randn(2, 3))
    assert seen == ["hook"]
    model.train()
    report.revert()
    assert model[0].training


def test_one_conversion_after_another_and_back_to_standard():
    model, x = small_cnn(), torch.randn(2, 3, 6, 6)
    names = [type(m) for m in model]
    expected = model(x)
    convert(model, "norm-like")
    model[5].beta = 0.5
    convert(model, "affine-like")
    assert model[5].beta == 1.0
    convert(model, "gradient-only")
    convert(model, "standard")
    assert [type(m) for m in model] == names
    torch.testing.assert_close(model(x), expected)


def test_a_shared_layer_stays_shared():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    report = convert(model, "affine-like")
    assert type(model[0]) is AffineLikeLinear
    assert model[0] is model[2]
    assert set(report.swapped) == {"0", "2"}
    report.revert()
    assert model[0] is model[2] is shared


def test_choice_of_layers():
    for layers in (["narrow", "w*"], lambda path, module: path in ("narrow", "widen")):
        model = Block()
        report = convert(model, "affine-like", layers)
        assert set(report.swapped) == {"widen", "narrow"}
        assert report.left["qkv"] == "not chosen"
    with pytest.raises(ValueError, match=r"'nothing\.\*', which matches no module"):
        convert(Block(), "affine-like", ["nothing.*"])
    with pytest.raises(ValueError, match="must be one of 'standard'"):
        convert(Block(), "affine")


def test_what_is_left_says_why():
    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    model = nn.ModuleDict(
        {
            "own": Own(2, 2),
            "lazy": nn.LazyLinear(2),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "spectral": nn.utils.spectral_norm(nn.Linear(2, 2)),
            "complex": nn.Linear(2, 2, dtype=torch.complex64),
            "transposed": nn.ConvTranspose2d(2, 2, 1),
            "attention": nn.MultiheadAttention(4, 2),
        }
    )
    report = convert(model, "affine-like")
    assert not report.swapped
    assert {path: why.split()[0] for path, why in report.left.items()} == {
        "own": "Own",
        "lazy": "lazy:",
        "parametrized": "parametrized:",
        "parametrized.parametrizations.weight": "ParametrizationList",
        "spectral": "its",
        "complex": "its",
        "transposed": "ConvTranspose2d",
        "attention": "its",
        "attention.out_proj": "nn.MultiheadAttention",
    }
    assert "transposed" in str(report)
    alone = convert(nn.Linear(2, 2), "affine-like")
    assert "the model itself" in alone.left[""]


@pytest.mark.slow
def test_vit_b_16():
    model = vit_b_16(weights=None, image_size=32, num_classes=7).eval()
    nn.init.normal_(model.heads.head.weight)  # torchvision initialises it with zeros
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = model(x)
        plain = convert(model, "affine-like")
        assert len(plain.swapped) == 1 + 12 * 2 + 1
        assert "attention=True" in plain.left["encoder.layers.encoder_layer_0.self_attention"]
        plain.revert()
        opened = convert(model, "affine-like", attention=True)
        assert len(opened.swapped) == 1 + 12 * (2 + 1 + 4) + 1
        assert not torch.allclose(model(x), before)
        opened.revert()
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"kdim": 3, "bias": False}, {"add_bias_kv": True}])
def test_opened_attention(options):
    model = nn.Sequential(nn.MultiheadAttention(8, 2, **options, dtype=torch.float64))
    attention, bias_k = model[0], model[0].bias_k
    model[0].requires_grad_(False)
    x = [torch.randn(5, 1, w, dtype=torch.float64) for w in (8, attention.kdim, attention.vdim)]
    expected = attention(*x)[0]
    state, values = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    report = convert(model, "gradient-only", attention=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model[0]) is CorrectedMultiheadAttention
    assert {type(m) for m in model[0].children()} == {GradientOnlyLinear}
    assert model[0].bias_k is bias_k
    assert not any(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model[0](*x)[0], expected)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    with torch.no_grad():
        model[0].k_proj.weight.mul_(2.0)
    changed = model[0](*x)[0]
    report.revert()
    assert model[0] is attention
    torch.testing.assert_close(attention(*x)[0], changed)


# torch's own fast path warns about its nested tensors.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("attention", [False, True])
def test_torchs_transformer_does_not_bypass_the_swapped_layers(attention):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padding)
    report = convert(model, "affine-like", attention=attention)
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=padding)
    # with gradients torch does not take its fast path
    slow = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(fast, slow)
    report.revert()
    with torch.no_grad():
        torch.testing.assert_close(model(x, src_key_padding_mask=padding), before)


def test_layers_whose_forward_is_not_the_classs_are_left():
    """A successor would run the old forward, and correct nothing."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    forward = model[0].forward
    model[0].forward = lambda x: forward(x)
    model[1].compile(backend="eager")
    report = convert(model, "affine-like")
    assert set(report.swapped) == {"2"}
    assert "forward was replaced" in report.left["0"] and "compiled" in report.left["1"]


@pytest.mark.parametrize("name", ["q_proj", "out_proj"])
def test_an_attention_that_is_parametrized_since_is_not_reverted(name):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "l": nn.Linear(8, 8)})
    report = convert(model, "affine-like", layers=["a", "l"], attention=True)
    nn.utils.parametrizations.weight_norm(getattr(model["a"], name))
    with pytest.raises(RuntimeError, match=r"the weight of 'a' is computed from other parameters"):
        report.revert()
    assert type(model["l"]) is AffineLikeLinear
    nn.utils.parametrize.remove_parametrizations(getattr(model["a"], name), "weight")
    report.revert()
    assert type(model["a"]) is nn.MultiheadAttention and type(model["l"]) is nn.Linear

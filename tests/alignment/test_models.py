"""Models of libraries: every matrix is measured, and the graph of layers matches their papers."""

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("transformers")
import torchvision
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from adiv_monitor.alignment import Alignment, Probe


def test_resnet() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    alignment = Alignment(model, Probe(torch.randn(2, 3, 64, 64)))
    fed = {layer.path: layer.predecessors for layer in alignment.layers}
    assert len(fed) == 21
    assert alignment.unmeasured == []
    roles = {layer.path: layer.role for layer in alignment.layers}
    assert [path for path, role in roles.items() if role != "hidden"] == ["conv1", "fc"]
    assert (roles["conv1"], roles["fc"]) == ("embedding", "readout")
    assert fed["layer1.0.conv2"] == ("layer1.0.conv1",)
    assert fed["layer1.1.conv1"] == ("conv1", "layer1.0.conv2")  # the residual stream
    assert set(fed["layer2.1.conv1"]) == {"layer2.0.conv2", "layer2.0.downsample.0"}


@pytest.mark.filterwarnings("ignore")
def test_a_language_model_with_tied_weights() -> None:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    model = GPT2LMHeadModel(config)
    alignment = Alignment(model, Probe({"input_ids": torch.randint(50, (2, 9))}))
    layers = {layer.path.removeprefix("transformer."): layer for layer in alignment.layers}
    assert alignment.unmeasured == []
    assert layers["wte"].parameters[0] is layers["lm_head"].parameters[0]
    assert [p for p, x in layers.items() if x.role == "embedding"] == ["wte", "wpe"]
    assert [p for p, x in layers.items() if x.role == "readout"] == ["lm_head"]
    stream = {"wte", "wpe", "h.0.attn.c_proj", "h.0.mlp.c_proj"}
    found = {p.removeprefix("transformer.") for p in layers["h.1.attn.c_attn"].predecessors}
    assert found == stream
    assert layers["h.0.mlp.c_fc"].fan_in == 32  # stored as (inputs, outputs)
    assert layers["h.0.mlp.c_fc"].fan_out == 128


def test_torchs_own_encoder_takes_no_short_cut() -> None:
    """The encoder's fast path for evaluation, which bypasses the measured calls, is not used."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    alignment = Alignment(encoder, Probe(torch.randn(2, 5, 16)))
    assert alignment.unmeasured == []
    assert len(alignment.layers) == 12
    assert alignment.layers[-1].role == "readout"

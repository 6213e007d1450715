"""Of public architectures, untrained and as they are meant to be, nothing is to be acted on."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from computes import Computes
from torch import nn
from trial_setups import loss, setup

from adiv_monitor import audit
from adiv_monitor.audit.training.setup import Setup, loss_of_output
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.record import Record

SAMPLES, CLASSES, WORDS, PLACES = 6, 10, 64, 16
VISION = (
    *("resnet18", "densenet121", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0"),
    *("convnext_tiny", "regnet_y_400mf", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5"),
    *("swin_t", "swin_v2_t"),
)
CAUSAL = ("gpt2", "llama", "gpt_neox", "opt", "bloom", "mamba", "mixtral", "gptj", "codegen")
MASKED = ("bert", "roberta", "electra", "distilbert", "albert", "deberta-v2", "longformer")
IMAGES = ("vit", "swin", "poolformer")
# Small, under all the names that configurations have for it.
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("vocab_size",), WORDS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "num_labels": CLASSES,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    "attention_window": 8,
    "pad_token_id": 0,
    "num_local_experts": 2,
    "state_size": 4,
    "expand": 2,
    "use_cache": False,
}


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def classified(model: nn.Module, side: int) -> Setup:
    chance = drawn()
    batches = tuple(
        (torch.randn(SAMPLES, 3, side, side, generator=chance),
         torch.randint(CLASSES, (SAMPLES,), generator=chance))
        for _ in range(4)
    )  # fmt: skip
    return setup(model=model, batches=batches, loss=loss, steps=4)


def of_torchvision(name: str) -> Setup:
    from torchvision import models

    return classified(getattr(models, name)(weights=None, num_classes=CLASSES), 64)


def of_transformers(name: str, head: str) -> nn.Module:
    import transformers

    fitting = {"depths": [1, 1], "num_heads": [2, 2], "embed_dim": 16, "window_size": 2}
    small = SMALL if name != "swin" else {**fitting, "image_size": 32, "num_labels": CLASSES}
    if name == "poolformer":
        small = {"num_labels": CLASSES, "hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1]}
    known = transformers.AutoConfig.for_model(name)
    names = {n for n in small if hasattr(known, n)}
    config = transformers.AutoConfig.for_model(name, **{n: small[n] for n in names})
    return getattr(transformers, head).from_config(config)


def lines(head: str, name: str) -> Setup:
    chance = drawn()
    words = torch.randint(4, WORDS, (4, SAMPLES, PLACES), generator=chance)
    batches: tuple[Any, ...] = tuple({"input_ids": x, "labels": x.clone()} for x in words)
    if head == "AutoModelForMaskedLM":
        for batch in batches:
            asked_for = torch.rand(SAMPLES, PLACES, generator=chance) < 0.3
            batch["labels"][~asked_for] = -100
            batch["input_ids"] = batch["input_ids"].masked_fill(asked_for, 3)
    model = of_transformers(name, head)
    return setup(model=model, batches=batches, loss=loss_of_output, steps=4)


ARCHITECTURES: dict[str, Callable[[], Setup]] = {
    **{name: lambda name=name: of_torchvision(name) for name in VISION},
    **{name: lambda name=name: lines("AutoModelForCausalLM", name) for name in CAUSAL},
    **{name: lambda name=name: lines("AutoModelForMaskedLM", name) for name in MASKED},
    **{name + " of transformers": lambda name=name: classified(
        Computes(lambda m, x: m.model(x).logits,
                 model=of_transformers(name, "AutoModelForImageClassification")), 32)
       for name in IMAGES},
}  # fmt: skip


def acts(of: Record) -> list[str]:
    found = [finding for finding in diagnose(of) if finding.strength == "act"]
    return [f"{finding.name}: {finding.summary}" for finding in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_of_an_untrained_architecture_an_audit_has_nothing_to_act_on(name: str) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of = ARCHITECTURES[name]()
        report = audit(of.model, of.batches, loss=of.loss, steps=12, try_fixes=False)
    assert acts(report.record) == []

"""Small random configurations of models from transformers, peft and timm; nothing is downloaded.

The libraries are imported where a model is built: a table of the others needs none of them.
"""

from functools import partial

import torch
from torch import Tensor, nn

from zoo.training import Specimen, Training, training
from zoo.vision import CLASSES, classified

WORDS = 64
TEXT = (2, 12)  # sequences, tokens
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def words() -> Tensor:
    return torch.randint(3, WORDS, TEXT)


def language(model: nn.Module) -> Training:
    """The next word, each from those before it."""

    def loss(model: nn.Module) -> Tensor:
        tokens = words()
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return training(model, loss)


def made(model: str, **settings: object) -> nn.Module:
    """A model of transformers, of random weights, with these settings and the others' defaults."""
    import transformers

    kind = getattr(transformers, model)
    return kind(kind.config_class(vocab_size=WORDS, **settings))


def bert() -> Training:
    """Masked words, padded sequences; embedding and read-out are tied."""
    model = made("BertForMaskedLM", intermediate_size=64, max_position_embeddings=16, **SMALL)

    def loss(model: nn.Module) -> Tensor:
        tokens, chosen = words(), torch.rand(TEXT) < 0.3
        attended = torch.arange(TEXT[1]) < torch.tensor([[12], [9]])
        labels = tokens.where(chosen & attended, -100)
        return model(tokens.where(~chosen, 1), attention_mask=attended, labels=labels).loss

    return training(model, loss)


def gpt2() -> Training:
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return language(made("GPT2LMHeadModel", bos_token_id=0, eos_token_id=0, **sizes))


GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 16, "attention_dropout": 0.1}


def llama_model() -> nn.Module:
    """Grouped queries, RMSNorm, a read-out of its own."""
    return made("LlamaForCausalLM", intermediate_size=64, **GROUPED, **SMALL)


def mixtral() -> Training:
    """Four experts in one tensor, of which each token takes two; the router's own loss."""
    router = {"num_local_experts": 4, "output_router_logits": True, "router_jitter_noise": 0.1}
    return language(made("MixtralForCausalLM", intermediate_size=48, **router, **GROUPED, **SMALL))


def t5() -> Training:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = made("T5ForConditionalGeneration", decoder_start_token_id=0, **sizes)
    return training(model, lambda m: m(input_ids=words(), labels=words()).loss)


def vit() -> Training:
    sizes = {"image_size": 32, "patch_size": 8, "intermediate_size": 64, "num_labels": CLASSES}
    drops = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = made("ViTForImageClassification", **sizes, **drops, **SMALL)

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(4, 3, 32, 32), labels=torch.randint(CLASSES, (4,))).loss

    return training(model, loss)


def whisper() -> Training:
    """Spectrograms to words; convolutions, fixed and learned positions, cross-attention."""
    of_both = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
    sizes = {f"{part}_{k}": v for part in ("encoder", "decoder") for k, v in of_both.items()}
    sizes |= {"num_mel_bins": 16, "d_model": 32, "max_source_positions": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    longest = {"max_target_positions": TEXT[1], "dropout": 0.1}
    model = made("WhisperForConditionalGeneration", **sizes, **tokens, **longest)

    def loss(model: nn.Module) -> Tensor:
        return model(input_features=torch.randn(2, 16, 32), labels=words()).loss

    return training(model, loss)


def mamba() -> Training:
    sizes = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4}
    return language(made("MambaForCausalLM", **sizes))


def wav2vec2() -> Training:
    """Sound to words by CTC; a weight-normed convolution, and masked stretches of time."""
    sizes = {"conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2)}
    sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    masked = {"mask_time_length": 4, "mask_time_prob": 0.2}
    whole = {"layerdrop": 0.0}  # else whole layers are left out of a step
    model = made("Wav2Vec2ForCTC", intermediate_size=64, **sizes, **masked, **whole, **SMALL)

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(2, 1600), labels=torch.randint(1, WORDS, (2, 5))).loss

    return training(model, loss)


def lora() -> Training:
    """A frozen Llama; low-rank updates with dropout, of its queries and values."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return language(peft.get_peft_model(llama_model(), config))


def timm_classifier(title: str, name: str, size: int, **settings: object) -> Specimen:
    """A model of timm's with these settings, for images of this size."""

    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, drop_path_rate=0.1, **settings)

    return Specimen(title, partial(classified, make, 4, 3, size, size))


TRANSFORMERS = {
    "bert": Specimen("BERT, tied read-out", bert),
    "gpt2": Specimen("GPT-2", gpt2),
    "llama": Specimen("Llama", lambda: language(llama_model())),
    "mixtral": Specimen("Mixtral, 4 experts", mixtral),
    "t5": Specimen("T5", t5),
    "hf_vit": Specimen("ViT (transformers)", vit),
    "whisper": Specimen("Whisper", whisper),
    "mamba": Specimen("Mamba", mamba),
    "wav2vec2": Specimen("Wav2Vec2", wav2vec2),
}

PEFT = {
    "lora": Specimen(
        "Llama, frozen, with LoRA",
        lora,
        warnings=["`is_gradient_checkpointing` is deprecated"],  # asked for by peft
    )
}

TIMM = {
    "convnextv2": timm_classifier(
        "ConvNeXtV2 (timm)", "convnextv2_atto", 64, depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)
    ),
    "eva02": timm_classifier(
        "EVA-02 (timm)",
        "eva02_tiny_patch14_224",
        56,
        img_size=56,
        embed_dim=48,
        depth=2,
        num_heads=3,
        proj_drop_rate=0.1,
    ),
    "nfnet": timm_classifier(
        "NFNet (timm)",
        "dm_nfnet_f0",
        64,
        depths=(1, 1, 2, 1),
        channels=(32, 64, 96, 96),
        stem_chs=16,
        group_size=16,
    ),
}

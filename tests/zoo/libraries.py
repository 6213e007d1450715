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


def bert() -> Training:
    """Masked words, padded sequences; embedding and read-out are tied."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=WORDS, intermediate_size=64, max_position_embeddings=16, **SMALL
    )

    def loss(model: nn.Module) -> Tensor:
        tokens, chosen = words(), torch.rand(TEXT) < 0.3
        attended = torch.arange(TEXT[1]) < torch.tensor([[12], [9]])
        labels = tokens.where(chosen & attended, -100)
        return model(tokens.where(~chosen, 1), attention_mask=attended, labels=labels).loss

    return training(transformers.BertForMaskedLM(config), loss)


def gpt2_model() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama_model() -> nn.Module:
    """Grouped queries, RMSNorm, a read-out of its own."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        intermediate_size=64,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
        **SMALL,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral_model() -> nn.Module:
    """Four experts in one tensor, of which each token takes two; the router's own loss."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=WORDS,
        intermediate_size=48,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
        num_local_experts=4,
        output_router_logits=True,
        router_jitter_noise=0.1,
        **SMALL,
    )
    return transformers.MixtralForCausalLM(config)


def t5() -> Training:
    import transformers

    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )

    def loss(model: nn.Module) -> Tensor:
        return model(input_ids=words(), labels=words()).loss

    return training(transformers.T5ForConditionalGeneration(config), loss)


def vit() -> Training:
    import transformers

    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        intermediate_size=64,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=CLASSES,
        **SMALL,
    )

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(4, 3, 32, 32), labels=torch.randint(CLASSES, (4,))).loss

    return training(transformers.ViTForImageClassification(config), loss)


def whisper() -> Training:
    """Spectrograms to words; convolutions, fixed and learned positions, cross-attention."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=TEXT[1],
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def loss(model: nn.Module) -> Tensor:
        return model(input_features=torch.randn(2, 16, 32), labels=words()).loss

    return training(transformers.WhisperForConditionalGeneration(config), loss)


def mamba_model() -> nn.Module:
    import transformers

    config = transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=4
    )
    return transformers.MambaForCausalLM(config)


def wav2vec2() -> Training:
    """Sound to words by CTC; a weight-normed convolution, and masked stretches of time."""
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS,
        intermediate_size=64,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_length=4,
        mask_time_prob=0.2,
        layerdrop=0.0,  # which leaves whole layers out of a step
        **SMALL,
    )

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(2, 1600), labels=torch.randint(1, WORDS, (2, 5))).loss

    return training(transformers.Wav2Vec2ForCTC(config), loss)


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
    "gpt2": Specimen("GPT-2", lambda: language(gpt2_model())),
    "llama": Specimen("Llama", lambda: language(llama_model())),
    "mixtral": Specimen("Mixtral, 4 experts", lambda: language(mixtral_model())),
    "t5": Specimen("T5", t5),
    "hf_vit": Specimen("ViT (transformers)", vit),
    "whisper": Specimen("Whisper", whisper),
    "mamba": Specimen("Mamba", lambda: language(mamba_model())),
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

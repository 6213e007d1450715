"""TRL's trainers with adapters of PEFT: one line measures them; the training is bit-identical."""

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import blocks

from adiv_monitor.huggingface import DivergenceTrainerCallback
from adiv_monitor.sinks import MemorySink

STEPS = 3
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "red", "house"]
PAGE = blocks.ROOT / "docs" / "fine-tuning.md"
OF_PACKAGES = ("Future", "Deprecation", "User", "Resource")  # about one another
pytestmark = [pytest.mark.filterwarnings(f"ignore::{name}Warning") for name in OF_PACKAGES]


@pytest.fixture
def trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # a Trainer may set it
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    pytest.importorskip("peft", reason='pip install "adiv-monitor[whole]"')
    found: ModuleType = pytest.importorskip("trl", reason='pip install "adiv-monitor[whole]"')
    return found


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    splits = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    splits.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=splits, **marks)


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    marks = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers, **marks, max_position_embeddings=64))


def dataset(kind: str) -> Any:
    from datasets import Dataset

    chance = torch.Generator().manual_seed(0)

    def say(count: int) -> str:
        return " ".join(WORDS[int(i)] for i in torch.randint(12, (count,), generator=chance))

    columns = {"SFT": ("text",), "DPO": ("prompt", "chosen", "rejected"), "GRPO": ("prompt",)}[kind]
    return Dataset.from_dict({name: [say(6) + " " for _ in range(24)] for name in columns})


def lengths(completions: list[str], **_: Any) -> list[float]:
    """Reward different words."""
    return [float(len(set(text.split()))) for text in completions]


def run(trl: ModuleType, kind: str, callbacks: list[Any], adapter: Any, **options: Any) -> Any:
    """Train by one of TRL's trainers; return it."""
    own = {
        "SFT": {"max_length": 16},
        "DPO": {"max_length": 32},
        "GRPO": {"num_generations": 2, "max_completion_length": 6},
    }[kind]
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    fixed = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    alike = {"logging_steps": 1, "bf16": False, "dataloader_pin_memory": False}
    config = getattr(trl, f"{kind}Config")("out", **{**own, **quiet, **fixed, **alike, **options})
    reward = {"reward_funcs": lengths} if kind == "GRPO" else {}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model(),
        args=config,
        train_dataset=dataset(kind),
        processing_class=tokenizer(),
        peft_config=adapter,
        callbacks=callbacks,
        **reward,
    )
    trainer.train()
    return trainer


def history(trainer: Any) -> list[tuple[float, float]]:
    logs = trainer.state.log_history
    return [(log["loss"], log["grad_norm"]) for log in logs if "grad_norm" in log]


LARGE = {"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
ADAPTERS = {
    "LoRA": ({"lora_dropout": 0.1}, {}),
    "DoRA, bf16, checkpoints, accumulation": ({"use_dora": True}, LARGE),
}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_a_trainer_of_trl_is_measured_and_its_training_is_bit_identical(
    trl: ModuleType, kind: str, adapter: str
) -> None:
    """Every step is measured, so a GRPO trainer generates with hooks on."""
    peft = pytest.importorskip("peft")
    given, options = ADAPTERS[adapter]
    modules = ["q_proj", "v_proj", "up_proj"]
    memory = MemorySink()

    def train(*callbacks: Any) -> Any:
        config = peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM", **given)
        return run(trl, kind, [*callbacks], config, **options)

    plain = train()
    ours = train(DivergenceTrainerCallback(1, sinks=[memory], on_error="raise"))
    assert history(plain) == history(ours) and len(history(ours)) == STEPS
    weights = ours.model.state_dict()
    assert all(torch.equal(weights[name], w) for name, w in plain.model.state_dict().items())
    # Every trained parameter has a reading, and both A and B move.
    reports = memory.reports
    assert [report.step for report in reports] == [*range(STEPS)]
    for report in reports:
        assert report.coverage == 1 and not report.unsupported
        for part in ("lora_A", "lora_B"):
            assert sum(f".{part}" in path for path in report.layers) == 6
    at_first = reports[0].layers.items()  # B is zero: A has no gradient
    assert all(reading.idle_share == 1 for path, reading in at_first if ".lora_A" in path)
    last = reports[-1].layers
    assert all((reading.update_ratio or 0) > 0 for reading in last.values())


@pytest.mark.slow
def test_the_recipe_of_the_page(trl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands there, it trains, and the tracker has a picture, findings and scalars."""
    trackio = pytest.importorskip("trackio", reason='pip install "adiv-monitor[products]"')
    monkeypatch.setenv("TRACKIO_DIR", str(Path.cwd() / "tracked"))
    logged: list[dict[str, Any]] = []
    log = trackio.log
    monkeypatch.setattr(trackio, "log", lambda m, step=None: (logged.append(m), log(m, step)))
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, use_cpu=True))  # as it says
    recipe, *_, loop = blocks.python_blocks(PAGE)
    assert len(recipe.splitlines()) <= 15
    names = {"model": model(), "dataset": dataset("SFT"), "tokenizer": tokenizer()}
    exec(compile(recipe, PAGE.name, "exec"), names)
    keys = {key for row in logged for key in row}
    assert {"adiv/overview", "adiv.summary/findings"} <= keys
    assert any(key.startswith("train/adiv.update_ratio") for key in keys)
    of_loop = blocks.names()
    parts = {"model_parts": [of_loop["model"]], "optimizers": of_loop["optimizer"]}
    train = of_loop["train"]
    once = {"train": lambda given, optimizers: train(given[0], optimizers)}
    exec(compile(loop, PAGE.name, "exec"), {**parts, **once})

"""Hugging Face's Trainer: a small BERT learns which of two symbols is more frequent.

It prints a table every 50 steps. The Trainer's history has the summaries over layers; some are
printed at the end. With `report_to="tensorboard"`, "wandb" and the like instead of "none", these
receive the summaries and scalars by block, too.

    python examples/hugging_face_trainer.py
"""

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from adiv_monitor.huggingface import DivergenceTrainerCallback
from adiv_monitor.sinks import TableSink

SYMBOLS, LENGTH = 8, 15


def sequences(count: int) -> list[dict[str, Tensor]]:
    """Return random symbols (LENGTH,), and whether more of them are 1 than 0."""
    ids = torch.randint(SYMBOLS, (count, LENGTH))
    labels = ((ids == 1).sum(dim=1) > (ids == 0).sum(dim=1)).long()
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=SYMBOLS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            "runs/hugging_face_trainer",
            max_steps=150,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            logging_steps=50,
            eval_strategy="steps",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=sequences(2000),
        eval_dataset=sequences(200),
        callbacks=[DivergenceTrainerCallback(sinks=[TableSink()])],
    )
    trainer.train()
    for record in trainer.state.log_history:
        for name in ("adiv.summary/update_cosine_median", "eval_loss"):
            if name in record:
                print(f"After step {record['step']}: {name} {record[name]:.3f}")


if __name__ == "__main__":
    main()

"""Hugging Face's Trainer: a small BERT learns which of two symbols is the more frequent.

A table is printed every 50 steps. The summaries over layers are in the Trainer's own history, of
which some is shown at the end. With `report_to="tensorboard"`, "wandb" and the like instead of
"none" they are there too, with every layer.

    python examples/hugging_face_trainer.py
"""

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from adiv_monitor.huggingface import DivergenceTrainerCallback
from adiv_monitor.sinks import TableSink

SYMBOLS, LENGTH = 8, 15


def sequences(count: int) -> list[dict[str, Tensor]]:
    """Random symbols (LENGTH,), and whether there are more 1s than 0s among them."""
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

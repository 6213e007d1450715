"""A small training by Hugging Face's Trainer, which tests of the callback share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

STEPS, SIZE = 8, 6
CHANCE = torch.Generator().manual_seed(0)
ROWS = [
    {"x": torch.randn(4, generator=CHANCE), "labels": torch.tensor(i % 3)}
    for i in range(STEPS * SIZE)
]


class Rows(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Samples in their order, where a list would be shuffled."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(ROWS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


class Seed(TrainerCallback):
    """Seed the dropout: the Trainer's loaders draw from the same stream."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


def trainer_in(
    folder: Path, *callbacks: Any, model: Any = None, kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    """Return a Trainer on the rows, with output in the folder; keywords of TrainingArguments."""
    fixed = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": SIZE,
        "per_device_eval_batch_size": SIZE,
        "max_steps": STEPS,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return kind(
        model=Net() if model is None else model,
        args=TrainingArguments(**{**fixed, **options}),
        train_dataset=Rows(),
        eval_dataset=ROWS[: 2 * SIZE],
        callbacks=[Seed(), *callbacks],
    )

"""A small training by Lightning's Trainer, which tests of the callback share."""

from types import ModuleType
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

QUIET = [
    # Lightning's own advice on loaders without workers and on intervals longer than an epoch.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # Lightning 2.6 with torch 2.15 calls deprecated functions of torch.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]
CHANCE = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randn(6, 4, generator=CHANCE), torch.randint(3, (6,), generator=CHANCE))
    for _ in range(8)
]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


def module(package: ModuleType = pl) -> Any:
    """Return a classifier as a LightningModule of this package."""

    class Classifier(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.criterion = net(), nn.CrossEntropyLoss()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 0:
                torch.manual_seed(2)  # here, as the loader draws from the same stream
            x, y = batch
            loss = self.criterion(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Classifier()


def trainer(package: ModuleType = pl, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    fixed = {"accelerator": "cpu", "max_epochs": 1, "enable_checkpointing": False}
    return package.Trainer(**{**quiet, **fixed, **options})


def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(BATCHES, batch_size=None)

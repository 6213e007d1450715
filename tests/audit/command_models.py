"""Models, batches, losses and optimizers that tests of the command name by import path."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
no_module = {"a": 1}
calls: list[str] = []  # what code of ours was run


def mlp(inputs: int = 64, width: int = 16, classes: int = 10) -> nn.Module:
    layers = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))
    return nn.Sequential(nn.Flatten(), *layers)


def with_key(width: int, api_key: str, max_tokens: int) -> nn.Module:
    calls.append(api_key)
    return mlp(width=width)


class Evil:
    """An object that makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def broken() -> nn.Module:
    raise KeyError("ouch")


class LanguageModel(nn.Module):
    """A model that takes at most 16 tokens."""

    def __init__(self, words: int = 100, outputs: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, 16)
        self.positions = nn.Embedding(16, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, outputs or words)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        assert len(places) <= 16
        return self.head(self.block(self.tokens(tokens) + self.positions(places)))


def auto_encoder() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1))


class Segmentation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.map(x)}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(7, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.map(x + y)


def pairs() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for _ in range(3):
        yield torch.randn(4, 7), torch.randn(4, 7), torch.randn(4, 1)


def no_samples() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(0, 5), torch.zeros(0, dtype=torch.long))]


def exits(*_: object) -> None:
    sys.exit(0)


def of_model_and_batch(model: nn.Module, batch: Any) -> Tensor:
    calls.append("of_model_and_batch")
    return model(*batch[:-1]).square().mean()


def of_output_and_target(output: Tensor, target: Tensor) -> Tensor:
    calls.append("of_output_and_target")
    return F.mse_loss(output, target)


def interrupting(model: nn.Module, batch: Any) -> Tensor:
    calls.append("interrupting")
    if len(calls) > 30:
        raise KeyboardInterrupt
    return model(*batch[:-1]).square().mean()


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)

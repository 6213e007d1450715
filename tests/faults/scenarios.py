"""Small trainings that, together, go through all of the monitor."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from adiv_layers import (
    AffineLikeLinear,
    GradientOnlyConv2d,
    GradientOnlyLinear,
    NormLikeLinear,
    PatchNormConv2d,
)
from function_cases import CASES as FUNCTIONS
from function_cases import FunctionCase
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from adiv_monitor.alignment import Probe


def plain(model: nn.Module, optimizer: Optimizer, loss: Callable[[nn.Module], Tensor]) -> Tensor:
    """One step as it is usually taken."""
    optimizer.zero_grad()
    value = loss(model)
    value.backward()
    optimizer.step()
    return value.detach()


def in_parts(model: nn.Module, optimizer: Optimizer, loss: Callable[[nn.Module], Tensor]) -> Tensor:
    """Two micro-batches, zeroed in place before, clipped after; a first pass is thrown away."""
    for zeroed in (True, True, False):
        if zeroed:
            optimizer.zero_grad(set_to_none=False)
        value = loss(model)
        value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return value.detach()


def by_closure(
    model: nn.Module, optimizer: Optimizer, loss: Callable[[nn.Module], Tensor]
) -> Tensor:
    """The optimizer asks for the gradient."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    return optimizer.step(closure).detach()


@dataclass(frozen=True)
class Scenario:
    """A training.

    Attributes:
        build: makes the model, on seeded random numbers.
        loss: draws a batch and gives the loss.
        options: of the monitor, made anew for each.
        step: takes a step.
        steps: how many are taken.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    options: Callable[[], Mapping[str, Any]] = dict
    step: Callable[[nn.Module, Optimizer, Callable[[nn.Module], Tensor]], Tensor] = plain
    steps: int = 2

    def make(self) -> tuple[nn.Module, Optimizer]:
        """The model and its optimizer, all random numbers seeded."""
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        model = self.build().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Attends(nn.Module):
    """Attention by torch's module and by its function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.own = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attend(x, x, x, need_weights=True)[0]
        q = self.own(x)
        x = functional.scaled_dot_product_attention(q, x, x, dropout_p=0.1 * self.training)
        return self.head(x)


class Recurrent(nn.Module):
    """Two recurrent modules, with a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.gru = nn.GRU(4, 3, num_layers=2, bidirectional=True)
        self.lstm = nn.LSTM(6, 4, batch_first=True, proj_size=3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lstm(self.gru(self.embed(tokens))[0])[0]


class Made(nn.Module):
    """A weight that is made of parameters, buffers that are written to, a gain of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv1d(4, 4, 3, padding=1, groups=2))
        self.norm = nn.BatchNorm1d(4)
        self.gate = nn.Parameter(torch.randn(4, 1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.view(6, 4, 2))) * torch.sigmoid(self.gate)
        return self.head(functional.dropout(x, 0.1, self.training).flatten(1))


class Recomputed(nn.Module):
    """Checkpointed in both ways, with a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.one, x, use_reentrant=False)
        x = self.frozen(torch.tanh(x))
        return self.head(checkpoint(self.two, x, use_reentrant=True))


class Odd(nn.Module):
    """A function without a rule: the module is measured as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan2(x @ self.weight, self.weight.sum(0))


def token_loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(0, 7, (3, 5))
    return functional.cross_entropy(model(tokens).flatten(0, 1), torch.randint(3, (15,)))


def dense_loss(model: nn.Module, width: int = 4) -> Tensor:
    x = torch.randn(6, width, dtype=torch.float64)
    return functional.cross_entropy(model(x), torch.randint(3, (6,)))


def function_loss(case: FunctionCase, model: nn.Module) -> Tensor:
    loss: Tensor = model(*case.data()).square().mean()
    return loss


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


class Corrected(nn.Module):
    """One of each corrected layer, and a layer whose parameter has hooks of its owner's."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = PatchNormConv2d(1, 2, 3, padding=1)
        self.kernels = GradientOnlyConv2d(2, 1, 3, padding=1)
        self.affine = AffineLikeLinear(4, 4)
        self.norm = NormLikeLinear(4, 4)
        self.proportional = GradientOnlyLinear(4, 4)
        self.head = nn.Linear(4, 3)
        self.head.weight.register_hook(_halved)

    def forward(self, x: Tensor) -> Tensor:
        x = self.kernels(self.patches(x.view(6, 1, 2, 2))).flatten(1)
        return self.head(self.proportional(self.norm(self.affine(x))))


def _halved(gradient: Tensor) -> Tensor:
    return gradient / 2


CRITERION = nn.CrossEntropyLoss()


def criterion(model: nn.Module) -> Tensor:
    loss: Tensor = CRITERION(model(torch.randn(6, 8).double()), torch.randint(3, (6,)))
    return loss


def aligned() -> dict[str, Any]:
    return {"alignment": Probe(torch.ones(4, 4, dtype=torch.float64).tril())}


MADE = partial(dense_loss, width=8)
SCENARIOS: dict[str, Scenario] = {
    "mlp": Scenario(mlp, dense_loss),
    "deep": Scenario(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), dense_loss),
    "in parts": Scenario(mlp, dense_loss, lambda: {"max_rows": 4}, in_parts),
    "by closure": Scenario(mlp, dense_loss, step=by_closure),
    "whole": Scenario(lambda: nn.Sequential(nn.Linear(4, 4), Odd(), nn.Linear(4, 3)), dense_loss),
    "checkpoints": Scenario(Recomputed, dense_loss, lambda: {"attainable": True}),
    "corrected": Scenario(Corrected, dense_loss, lambda: {"attainable": True, "max_rows": 5}),
    "alignment": Scenario(mlp, dense_loss, aligned),
    "overhead": Scenario(mlp, dense_loss, lambda: {"max_overhead": 0.5}),
    "realised": Scenario(mlp, dense_loss, lambda: {"realised": torch.Tensor.sum}),
    "made": Scenario(Made, MADE, lambda: {"max_rows": 8}),
    "made, realised": Scenario(Made, criterion, lambda: {"realised": CRITERION}),
    "loss of a module": Scenario(Made, criterion, lambda: {"loss": CRITERION}),
    "loss of a function": Scenario(mlp, dense_loss, lambda: {"loss": torch.Tensor.sum}),
    "recurrent": Scenario(Recurrent, token_loss, lambda: {"max_rows": 8}),
    "recurrent, realised": Scenario(Recurrent, token_loss, lambda: {"realised": True}),
    "attention": Scenario(
        Attends, token_loss, lambda: {"attention": True, "loss": torch.Tensor.sum}
    ),
    "alarms": Scenario(mlp, dense_loss, lambda: {"alarms": ["3: update_ratio > 100"]}),
    "norms": Scenario(mlp, dense_loss, lambda: {"watch": "norms", "spectral": True}),
    "own measures": Scenario(
        mlp, dense_loss, lambda: {"own_measures": {"sum": lambda rows: rows.gradient.sum()}}
    ),
}
SCENARIOS |= {
    f"function {name}": Scenario(case.model, partial(function_loss, case), steps=1)
    for name, case in FUNCTIONS.items()
}

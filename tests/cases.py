"""Tiny seeded models, optimizers and data shared by the tests, all in float64."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class TokenModel(nn.Module):
    """A model of embedding, LayerNorm, token-wise linear layers and a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 9)
        self.scale = nn.RMSNorm(9)
        self.head = nn.Linear(9, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens))
        return self.head(self.scale(torch.tanh(self.inner(hidden)))).mean(dim=1)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 8, (3, 2), stride=2, padding=(1, 2), dilation=(2, 1), groups=2),
        nn.GroupNorm(4, 8),
        nn.Conv2d(8, 8, 3, groups=8, padding=1, padding_mode="reflect", bias=False),
        nn.Flatten(2),
        nn.Conv1d(8, 4, 2, stride=2, padding=1, padding_mode="replicate"),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


@dataclass(frozen=True)
class Case:
    """A model with matching data."""

    build: Callable[[], nn.Module]
    data: Callable[[int], Tensor]

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        model = self.build().double()
        model(self.data(2))  # initialises lazy layers
        for parameter in model.parameters():  # so that no gain is 1 and no bias 0
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model

    def batches(self, count: int, size: int = 3) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(2)
        return [(self.data(size), torch.randint(3, (size,))) for _ in range(count)]


CASES = {
    "mlp": Case(mlp, lambda n: torch.randn(n, 5, dtype=torch.float64)),
    "cnn": Case(cnn, lambda n: torch.randn(n, 3, 5, 6, dtype=torch.float64)),
    "tokens": Case(TokenModel, lambda n: torch.randint(0, 11, (n, 5))),
}


class GradientMutatingSGD(torch.optim.Optimizer):
    """Sign descent with weight decay that writes into `.grad`, as some optimizers do."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.1).sign_()
                    p.add_(p.grad, alpha=-group["lr"])


class Around(torch.optim.Optimizer):
    """A wrapper that delegates its steps to another optimizer, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: object = None) -> None:
        self.inner.step()


class Tied(nn.Module):
    """A language model whose head has the weight of its embedding."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.middle(self.embed(tokens))))
        return logits


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "mutating": lambda p: GradientMutatingSGD(p, lr=0.01),
}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)

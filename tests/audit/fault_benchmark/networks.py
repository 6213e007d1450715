"""Networks of the fault benchmark: a body and a head, with a step of a few milliseconds."""

import itertools
from collections.abc import Callable, Sequence

import torch
from audit.fault_benchmark.data import VOCABULARY, WORDS
from torch import Tensor, nn
from torch.nn import functional


class Net(nn.Module):
    """A network of a body and a linear head."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


def mlp(
    widths: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU, dropout: float = 0
) -> Net:
    body: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths[:-1]):
        body += [nn.Linear(fan_in, fan_out), activation()]
        if dropout:
            body.append(nn.Dropout(dropout))
    return Net(nn.Sequential(*body), nn.Linear(widths[-2], widths[-1]))


def cnn(batch_norm: bool = False, layers: int = 2, channels: int = 16) -> Net:
    """Convolutions of images (1, 8, 8), halved after the first two, and a head of ten classes."""
    body: list[nn.Module] = []
    for layer in range(layers):
        fan_in = channels if layer else 1
        body.append(nn.Conv2d(fan_in, channels, 3, padding=1, bias=not batch_norm))
        if batch_norm:
            body.append(nn.BatchNorm2d(channels))
        body.append(nn.ReLU())
        if layer < 2:
            body.append(nn.MaxPool2d(2))
    return Net(nn.Sequential(*body, nn.Flatten()), nn.Linear(4 * channels, 10))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(inputs + self.branch(inputs))


def resnet() -> Net:
    stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
    body = nn.Sequential(
        *(stem, nn.MaxPool2d(2), Residual(12), Residual(12)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    return Net(body, nn.Linear(12, 10))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, width = inputs.shape
        qkv = self.qkv(self.norm1(inputs)).reshape(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        hidden = inputs + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.fc2(functional.gelu(self.fc1(self.norm2(hidden))))


class Patches(nn.Module):
    """Split images (1, 8, 8) into 4 places of 4 × 4 pixels."""

    def forward(self, images: Tensor) -> Tensor:
        return functional.unfold(images, 4, stride=4).transpose(1, 2)


class Positions(nn.Module):
    """A layer that adds a learned vector to each place."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.positions[: inputs.shape[1]]


class Pool(nn.Module):
    """The mean over places."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(1)


def vit(width: int = 32) -> Net:
    embed = (Patches(), nn.Linear(16, width), Positions(4, width))
    body = nn.Sequential(*embed, Block(width, 4, causal=False), nn.LayerNorm(width), Pool())
    return Net(body, nn.Linear(width, 10))


def gpt(width: int = 32, length: int = 16) -> Net:
    blocks = [Block(width, 4, causal=True) for _ in range(2)]
    embed = (nn.Embedding(WORDS, width), Positions(length, width))
    nn.init.normal_(embed[0].weight, std=0.1)
    return Net(nn.Sequential(*embed, *blocks, nn.LayerNorm(width)), nn.Linear(width, WORDS))


class Recurrent(nn.Module):
    """An embedding and an LSTM; returns the outputs at all places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.lstm(self.embedding(words))[0]


def lstm(width: int = 32) -> Net:
    return Net(Recurrent(width), nn.Linear(width, WORDS))


def bag(width: int = 16) -> Net:
    body = nn.Sequential(nn.EmbeddingBag(VOCABULARY, width), nn.Linear(width, 32), nn.ReLU())
    return Net(body, nn.Linear(32, 6))


def layers(model: nn.Module) -> list[nn.Linear | nn.Conv1d | nn.Conv2d]:
    """Return a model's linear layers and convolutions, in order of definition."""
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]


def initialise(model: nn.Module, gain: float) -> None:
    """Draw weights with standard deviation gain / √fan-in; set biases to 0."""
    with torch.no_grad():
        for layer in layers(model):
            layer.weight.normal_(std=gain * layer.weight[0].numel() ** -0.5)
            if layer.bias is not None:
                layer.bias.zero_()

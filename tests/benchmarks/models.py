"""The models that all benchmarks share, each with data of its usual shape.

The data are random, because a step's cost does not depend on them (`rows.py`, where readings
matter, has its own).
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Pre-norm attention and MLP, made of plain linear layers; q, k and v from one if packed."""

    def __init__(self, width: int, heads: int, causal: bool, packed: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if packed:
            self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        else:
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed, packed = self.norm1(x), getattr(self, "query_key_value", None)
        parts = (
            (self.query(normed), self.key(normed), self.value(normed))
            if packed is None
            else packed(normed).chunk(3, -1)
        )
        heads = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x))))


class GPT(nn.Module):
    """A causal language model."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(at))))


class ViT(nn.Module):
    """A vision transformer that classifies the mean over tokens."""

    def __init__(
        self,
        side: int,
        patch: int,
        channels: int,
        width: int,
        depth: int,
        heads: int = 4,
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Embedding((side // patch) ** 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads, False, packed) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(tokens + self.position(at))).mean(1))


def mlp(*widths: int) -> nn.Module:
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def images(*shape: int) -> Batch:
    return torch.randn(shape), torch.randint(10, (shape[0],))


def text(vocabulary: int, size: int, length: int) -> Batch:
    """Return tokens, each to be predicted from those before it."""
    tokens = torch.randint(vocabulary, (size, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Task:
    """A model and its training data."""

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    is_half: bool = False  # the forward pass in bfloat16, by autocast


vision = torchvision.models
TASKS = {
    "resnet18": Task(
        "ResNet-18, 16×3×64×64",
        lambda: vision.resnet18(num_classes=10),
        lambda: images(16, 3, 64, 64),
    ),
    "resnet18-224": Task(
        "ResNet-18, 32×3×224×224",
        lambda: vision.resnet18(num_classes=10),
        lambda: images(32, 3, 224, 224),
    ),
    "resnet18-160": Task(
        "ResNet-18, 16×3×160×160",
        lambda: vision.resnet18(num_classes=10),
        lambda: images(16, 3, 160, 160),
    ),
    "layers": Task(
        "60 × Linear(32), batch 64",
        lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(60))),
        lambda: (torch.randn(64, 32), torch.randint(10, (64,))),
    ),
    "mlp": Task(
        "MLP 3072-512-512-512-10, batch 128",
        lambda: mlp(3072, 512, 512, 512, 10),
        lambda: images(128, 3072),
    ),
    "mobilenet": Task(
        "MobileNetV3-small, 32×3×64×64",
        lambda: vision.mobilenet_v3_small(num_classes=10),
        lambda: images(32, 3, 64, 64),
    ),
    "convnext": Task(
        "ConvNeXt-T, 8×3×64×64",
        lambda: vision.convnext_tiny(num_classes=10),
        lambda: images(8, 3, 64, 64),
    ),
    "gpt": Task(
        "GPT, 4 layers, 256 wide, 8×256 tokens",
        lambda: GPT(vocabulary=128, length=256, width=256, depth=4, heads=4),
        lambda: text(128, 8, 256),
    ),
    "vit": Task(
        "ViT, 4 layers, 128 wide, 32×3×32×32",
        lambda: ViT(side=32, patch=4, channels=3, width=128, depth=4),
        lambda: images(32, 3, 32, 32),
    ),
}


class Trainer:
    """A model of a task with its optimizer, its data and optionally a monitor.

    Args:
        task: equal tasks give equal models and data.
        monitor: arguments of `Monitor` besides model and optimizer; None for no monitor.
        device: of model and data.
        backend: of `torch.compile`; None to run the model eagerly.
    """

    def __init__(
        self,
        task: Task,
        monitor: dict[str, object] | None = None,
        device: str = "cpu",
        backend: str | None = None,
    ) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = task.model()
            self.x, self.y = task.batch()
        self._run = torch.compile(self.model, backend=backend) if backend else self.model
        autocast = torch.autocast(device, dtype=torch.bfloat16)
        self._precision = autocast if task.is_half else contextlib.nullcontext()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.monitor: Monitor | None = None
        if monitor is not None:
            self.monitor = Monitor(self.model, self.optimizer, **monitor)
            self.monitor.attach()

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self._precision:
            loss = cross_entropy(self._run(self.x), self.y)
        loss.backward()
        self.optimizer.step()

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()

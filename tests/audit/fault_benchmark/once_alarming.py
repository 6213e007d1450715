"""Healthy runs of kinds in which the audit once raised false alarms.

Rules were corrected with these runs, so they do not count as unseen.
"""

import torch
from audit.fault_benchmark import data, networks
from audit.fault_benchmark.healthy import classify, cross_entropy
from audit.fault_benchmark.run import Healthy, Run
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW

PADDING = -100  # what cross-entropy passes over


class SeparateBlock(nn.Module):
    """Attention whose queries, keys and values are layers of their own, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.project = nn.Linear(width, width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, width = inputs.shape
        normed = self.norm1(inputs)
        parts = (layer(normed) for layer in (self.query, self.key, self.value))
        split = (x.reshape(batch, length, self.heads, -1).transpose(1, 2) for x in parts)
        mixed = functional.scaled_dot_product_attention(*split)
        hidden = inputs + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.fc2(functional.gelu(self.fc1(self.norm2(hidden))))


def _separate() -> Run:
    width = 32
    embed = (networks.Patches(), nn.Linear(16, width), networks.Positions(4, width))
    blocks = (SeparateBlock(width, 4), SeparateBlock(width, 4))
    body = nn.Sequential(*embed, *blocks, nn.LayerNorm(width), networks.Pool())
    model = networks.Net(body, nn.Linear(width, 10))
    return classify(model, data.images(64), AdamW, 1e-2, weight_decay=0.05)


class WithPooler(networks.Net):
    """A model with an unused pooler and second head, as in backbones for several tasks."""

    def __init__(self, body: nn.Module, head: nn.Module, width: int) -> None:
        super().__init__(body, head)
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.second = nn.Linear(width, 2)


def _pooler() -> Run:
    net = networks.vit()
    model = WithPooler(net.body, net.head, 32)
    return classify(model, data.images(64), AdamW, 1e-2, weight_decay=0.05)


def _backwards() -> Run:
    """Layers registered in the opposite of the order in which they run."""
    sizes = ((48, 10), (64, 48), (64, 64), (64, 64))
    backwards = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def compute(m: nn.Module, x: Tensor) -> Tensor:
        head, *hidden = m.layers
        for layer in reversed(hidden):
            x = layer(x).relu()
        return head(x)

    return classify(Computes(compute, layers=backwards), data.digits(), Adam, 3e-3)


class Players(nn.Module):
    """A generator of points in the plane, and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, points: Tensor) -> Tensor:
        return self.discriminator(points)


def both_players(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the losses of discriminator and generator, each with a gradient for its own only."""
    real, _ = batch
    made = model.generator(torch.randn(len(real), 8))
    told = model.discriminator(torch.cat([real, made.detach()]))
    right = torch.cat([torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])])
    judge = model.discriminator.requires_grad_(False)
    fooled = functional.softplus(-judge(made)).mean()
    judge.requires_grad_(True)
    return functional.binary_cross_entropy_with_logits(told, right) + fooled


def _adversarial(lr: float) -> Run:
    settings = {"lr": lr, "betas": (0.5, 0.999)}
    return Run(Players(), data.circles(), both_players, Adam, settings)


def _gan() -> Run:
    return _adversarial(1e-3)


def _slow_gan() -> Run:
    return _adversarial(2e-4)


def _padded() -> Run:
    """Return a run on lines of 4 to 16 words, padded to 48 places; the loss ignores padding."""
    lines = []
    for inputs, targets in data.text():
        lengths = torch.randint(4, inputs.shape[1] + 1, (len(inputs), 1))
        rest = torch.arange(inputs.shape[1]) >= lengths
        filled = functional.pad(inputs.masked_fill(rest, 0), (0, 32), value=0)
        asked = functional.pad(targets.masked_fill(rest, PADDING), (0, 32), value=PADDING)
        lines.append((filled, asked))
    model = networks.gpt(length=48)
    return Run(model, lines, cross_entropy, AdamW, {"lr": 3e-3, "weight_decay": 0.1})


SEPARATE = Healthy("vit-separate-qkv", "transformer", _separate)
POOLER = Healthy("vit-unused-pooler", "transformer", _pooler)
BACKWARDS = Healthy("mlp-registered-backwards", "MLP", _backwards)
GAN = Healthy("gan-adam", "GAN", _gan)
SLOW_GAN = Healthy("gan-adam-slow", "GAN", _slow_gan)
PADDED = Healthy("gpt-padded", "transformer", _padded)
HEALTHY = (SEPARATE, POOLER, BACKWARDS, GAN, SLOW_GAN, PADDED)

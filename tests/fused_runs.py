"""A small run of every kind of layer that the monitor's kernels support, with or without them."""

import math
from typing import Any
from unittest import mock

import torch
from adiv_layers.kernels import choice
from torch import Tensor, nn

from adiv_monitor import Monitor, StepReport
from adiv_monitor.sinks import MemorySink


class Net(nn.Module):
    """A model with every kind of layer that the kernels support, and one that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.conv = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.batch = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.layer = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 1500)
        self.out = nn.Linear(1500, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.batch(self.conv(self.embed(tokens).movedim(-1, 1))).relu_()
        x = self.layer(self.depthwise(x).flatten(2).mT)
        out: Tensor = self.out(self.wide(x).relu()).mean(1)
        return out


def trained(
    kernels: bool, *, device: str = "cpu", monitored: bool = True, **options: Any
) -> tuple[list[StepReport], nn.Module]:
    """Train two steps and return the reports and the model; `kernels` allows the kernels."""
    torch.manual_seed(1)
    net, tokens, labels = Net(), torch.randint(11, (2, 4, 4)), torch.randint(5, (2,))
    net, tokens, labels = net.to(device), tokens.to(device), labels.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    sink = MemorySink()
    with mock.patch.object(choice, "DEVICES", choice.DEVICES if kernels else set()):
        if monitored:
            monitor = Monitor(net, optimizer, every_n_steps=1, sinks=[sink], **options)
            monitor.attach()
        for _ in range(2):  # the first step finds what the second need not store
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(tokens), labels).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        if monitored:
            monitor.close()
    return sink.reports, net


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)

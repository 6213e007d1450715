"""The picture that dashboards show first, of a ResNet-18 with two layers that hardly learn.

A ResNet-18 learns scikit-learn's digits, enlarged to 32 × 32, by SGD with momentum 0.9; two of its
convolutions have a learning rate that is 1,000 times too low. About a minute on a CPU.

    python docs/figures/overview.py [--steps 40] [--out docs/images]
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torchvision.models import resnet18

from adiv_monitor import Monitor
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.sinks.board import pictures

SLOW = ("layer2.1.conv1.weight", "layer2.1.conv2.weight")
BATCH, RATE = 32, 0.03


def overview(steps: int) -> bytes:
    """The picture as PNG."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = functional.interpolate(images.float().view(-1, 1, 8, 8), size=32)
    images = ((images - images.mean()) / images.std()).expand(-1, 3, -1, -1)
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    named = dict(model.named_parameters())
    slow = [named.pop(name) for name in SLOW]
    groups = [{"params": list(named.values())}, {"params": slow, "lr": RATE / 1000}]
    optimizer = SGD(groups, lr=RATE, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    with Monitor(model, optimizer, every_n_steps=2, loss=loss, keep=steps) as monitor:
        for _ in range(steps):
            rows = torch.randint(len(images), (BATCH,))
            optimizer.zero_grad()
            loss(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    running = Running()
    for report in monitor.reports:
        running.add(report)
    return pictures(running.record(), running.findings())["adiv/overview"]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "images")
    chosen = options.parse_args()
    path = chosen.out / "overview.png"
    path.write_bytes(overview(chosen.steps))
    print(path)


if __name__ == "__main__":
    main()

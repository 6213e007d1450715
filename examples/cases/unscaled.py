"""The small CNN of PyTorch's tutorial on images as a decoder gives them: pixels from 0 to 255.

Two convolutions, three linear layers, no normalisation; Adam, batches of 64, five epochs. A
forgotten `transforms.ToTensor()` or `/ 255` is a common question, and such a training does learn.
"""

import cifar
import images
import torch
from case import Case
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

ROWS, EPOCHS = 64, 5


def case(data: str, *, quick: bool, device: str = "cpu") -> Case:
    """The case, on the CIFAR-10 at a place that `cifar.load` knows."""
    whole = cifar.load(data)
    train = images.apart(whole)
    return Case(
        title="A small CNN on images as they come",
        setting=f"The CNN of PyTorch's tutorial; Adam; batches of {ROWS}; pixels from 0 to 255.",
        data=whole.source,
        expected="The loss falls smoothly at the best learning rate. The audit names the scale of "
        "the inputs first. With its first advice, for the whole run and with the learning rate "
        "swept again, the test accuracy is higher by more than two standard errors.",
        unit="test accuracy, percent",
        higher=True,
        rates=(3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
        steps=3 if quick else EPOCHS * -(-len(train.train) // ROWS),
        model=lambda: model().to(device),
        optimizer=lambda model, lr: torch.optim.Adam(model.parameters(), lr),
        scheduler=None,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        part=images.parts(train.to(device), whole.to(device), ROWS, Tensor.float, None),
    )


def model() -> nn.Module:
    """The network; it takes rows of pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (3, 32, 32)),
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )

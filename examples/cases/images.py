"""Seeds' parts of a data set of images, of which some training images are held out."""

from collections.abc import Callable, Iterator
from itertools import count

import cifar
import torch
from case import Batch, Part
from torch import Tensor, nn

HELD_OUT = 5000

Inputs = Callable[[Tensor], Tensor]  # of rows of bytes
Augmented = Callable[[Tensor, torch.Generator], Tensor]  # of inputs


def apart(whole: cifar.Data) -> cifar.Data:
    """Some training images held out, 5,000 or a tenth."""
    return cifar.held_out(whole, min(HELD_OUT, len(whole.train) // 10))


def parts(
    train: cifar.Data, test: cifar.Data, rows: int, inputs: Inputs, augmented: Augmented | None
) -> Callable[[int], Part]:
    """What every seed trains on: an order of its own, and its own chance.

    Args:
        train: the data to train on, and those held out as its test images.
        test: the data to test on.
        rows: of a batch.
        inputs: what the network sees of rows of bytes.
        augmented: what training makes of inputs, at random; None: nothing.
    """

    def part(seed: int) -> Part:
        def batches() -> Iterator[Batch]:
            for epoch in count():
                chance = torch.Generator().manual_seed(1_000_003 * seed + epoch)
                order = torch.randperm(len(train.train), generator=chance)
                for chosen in torch.split(order.to(train.train.device), rows):
                    x = inputs(train.train[chosen])
                    x = x if augmented is None else augmented(x, chance)
                    yield x, train.train_labels[chosen]

        return Part(
            batches,
            lambda model: accuracy(model, inputs, train.test, train.test_labels),
            lambda model: accuracy(model, inputs, test.test, test.test_labels),
        )

    return part


def accuracy(model: nn.Module, inputs: Inputs, images: Tensor, labels: Tensor) -> float:
    """Percent of the images that a model knows."""
    found = zip(torch.split(images, 500), torch.split(labels, 500), strict=True)
    right = sum(int((model(inputs(x)).argmax(1) == y).sum()) for x, y in found)
    return 100 * right / len(images)

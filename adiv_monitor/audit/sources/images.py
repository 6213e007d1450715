"""Datasets of images with classes, in the shape that a model takes."""

from collections.abc import Callable
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from adiv_monitor.audit.options.usage import UsageError, blamed, needed

Labelled = Dataset[Any]  # a dataset of pairs (image, class)


def digits(shape: tuple[int, ...]) -> tuple[Labelled, int]:
    """Return scikit-learn's 1,797 handwritten digits and the number of classes, 10.

    The images have 8 × 8 grey values in [0, 1] and are adapted to the shape.
    """
    found = needed("sklearn.datasets", "--data digits").load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16
    labels = torch.from_numpy(found.target).long()
    return TensorDataset(adapted(images, shape), labels), 10


def cifar10(root: str, shape: tuple[int, ...], download: bool) -> tuple[Labelled, int]:
    """Return CIFAR-10's 50,000 training images, values in [0, 1], and the number of classes, 10.

    Raises:
        UsageError: The data set is missing or damaged.
    """
    datasets = needed("torchvision.datasets", "--data cifar10:")
    with blamed(f"--data cifar10:{root}: --download fetches it into that folder"):
        found = datasets.CIFAR10(root, transform=_prepared(shape), download=download)
    return found, 10


def imagefolder(root: str, shape: tuple[int, ...]) -> tuple[Labelled, int]:
    """Return the images of a folder that holds one folder per class, and the number of classes.

    Raises:
        UsageError: There is no such folder, or a class folder has no image.
    """
    datasets = needed("torchvision.datasets", "--data imagefolder:")
    if not Path(root).is_dir():
        raise UsageError(f"--data imagefolder:{root}: there is no such folder")
    with blamed(f"--data imagefolder:{root}: expected a folder of images for each class"):
        found = datasets.ImageFolder(root, transform=_prepared(shape))
    return found, len(found.classes)


def _prepared(shape: tuple[int, ...]) -> Callable[[Any], Tensor]:
    to_tensor = needed("torchvision.transforms.functional", "--data").to_tensor
    return lambda image: adapted(to_tensor(image)[None], shape)[0]


def adapted(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bring images (samples, channels, height, width) to another sample shape.

    (C, H, W): resized, grey repeated or colours averaged; (T, K): the rows of a grey image as a
    sequence; (K,): resized to the square image, grey or in colour, that has K entries, and
    flattened.

    Raises:
        UsageError: The images can't be brought to that shape.
    """
    if len(shape) == 3:
        return _channels(_resized(images, shape[1:]), shape[0], shape)
    if len(shape) == 2:
        return _channels(_resized(images, shape), 1, shape)[:, 0]
    for channels in (1, 3) if len(shape) == 1 else ():
        side = isqrt(shape[0] // channels)
        if channels * side * side == shape[0]:
            return _channels(_resized(images, (side, side)), channels, shape).flatten(1)
    raise UsageError(
        f"--data: images can't be brought to the model's inputs of shape {shape}; expected "
        "channels, height, width; or as many entries as a square image has"
    )


def _resized(images: Tensor, size: tuple[int, ...]) -> Tensor:
    if images.shape[2:] == size:
        return images
    return F.interpolate(images, size, mode="bilinear", antialias=True)


def _channels(images: Tensor, channels: int, shape: tuple[int, ...]) -> Tensor:
    if images.shape[1] == channels:
        return images
    if channels == 1:
        return images.mean(1, keepdim=True)
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    raise UsageError(
        f"--data: images of {images.shape[1]} channels can't be brought to the {channels} of the "
        f"model's inputs, {shape}"
    )

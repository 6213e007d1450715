"""Data sets of samples and their classes, in the shape that a model takes."""

from collections.abc import Callable
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from adiv_monitor.audit.options.usage import UsageError, blamed, needed
from adiv_monitor.audit.sources.targets import Inputs

_PLACES = 4  # cells of a class's pattern along each side of a random image
_WORDS = 64  # number of different random tokens
_SUCCESSORS = 4  # number of random tokens that may follow a token


def random(inputs: Inputs, classes: int, count: int, seed: int) -> TensorDataset:
    """Return samples and their classes; each sample depends on its class and on random numbers.

    Floats are the mean of the class, itself drawn from a normal distribution, plus noise of the
    same size: mean 0, standard deviation 1. The mean of an image is smooth, so that it survives
    pooling. The next token is larger by a number that is the class's, or by up to three more.

    Args:
        inputs: Shape and kind of a sample; sequences of tokens are one token longer, so that each
            token has a next one.
        classes: Number of classes.
        count: Number of samples.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    if inputs.vocabulary is not None:
        return TensorDataset(_chains(inputs, labels, classes, generator), labels)
    means = _means(inputs.shape, classes, generator)[labels]
    noise = torch.randn(count, *inputs.shape, generator=generator)
    return TensorDataset((means + noise) / 2**0.5, labels)


def _means(shape: tuple[int, ...], classes: int, generator: torch.Generator) -> Tensor:
    if len(shape) != 3 or min(shape[1:]) <= _PLACES:
        return torch.randn(classes, *shape, generator=generator)
    coarse = torch.randn(classes, shape[0], _PLACES, _PLACES, generator=generator)
    means = F.interpolate(coarse, shape[1:], mode="bicubic")
    return means / means.std()


def _chains(inputs: Inputs, labels: Tensor, classes: int, generator: torch.Generator) -> Tensor:
    """Return (samples, tokens + 1) whole numbers below the vocabulary size."""
    assert inputs.vocabulary is not None
    words = min(_WORDS, inputs.vocabulary)
    first = inputs.vocabulary - words  # small numbers are often special tokens
    *places, length = inputs.shape
    strides = torch.randint(words, (classes,), generator=generator)[labels]
    size = (len(labels), *places, length + 1)
    steps = torch.randint(_SUCCESSORS, size, generator=generator)
    steps += strides.reshape(-1, *(1 for _ in inputs.shape))
    starts = torch.randint(words, (*size[:-1], 1), generator=generator)
    return (starts + steps.cumsum(-1)) % words + first


def text(
    file: str, inputs: Inputs, tokenizer: Callable[[str], list[int]] | None
) -> tuple[TensorDataset, int]:
    """Return pieces of the text with the last token of each, and the number of tokens.

    A piece is one token longer than the model's inputs. The number of different tokens is one more
    than the largest token. Without a tokenizer each different byte of the file is a token, numbered
    from 0.

    Raises:
        UsageError: The model takes no tokens, or fewer different ones; or the file can't be read or
            is too short.
    """
    where = f"--data text:{file}"
    if inputs.vocabulary is None or len(inputs.shape) != 1:
        raise UsageError(f"{where}: expected a model that takes a sequence of tokens")
    content = Path(file).read_bytes()
    if tokenizer is None:
        _, tokens = torch.unique(torch.tensor(list(content)), return_inverse=True)
    else:
        tokens = torch.tensor(tokenizer(content.decode("utf-8", "replace")), dtype=torch.long)
    length = inputs.shape[0] + 1
    if len(tokens) < length:
        raise UsageError(f"{where}: has {len(tokens)} tokens, expected at least {length}")
    if (different := int(tokens.max()) + 1) > inputs.vocabulary:
        raise UsageError(
            f"{where}: has {different} different tokens, the model's vocabulary is "
            f"{inputs.vocabulary}; give it a larger one by --model-args"
        )
    pieces = tokens[: len(tokens) // length * length].reshape(-1, length)
    return TensorDataset(pieces, pieces[:, -1]), different


def digits(shape: tuple[int, ...]) -> tuple[Dataset[Any], int]:
    """Return scikit-learn's 1,797 handwritten digits and the number of classes, 10.

    The images have 8 × 8 grey values in [0, 1] and are adapted to the shape.
    """
    found = needed("sklearn.datasets", "--data digits").load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16
    labels = torch.from_numpy(found.target).long()
    return TensorDataset(adapted(images, shape), labels), 10


def of_files(
    kind: str, root: str, shape: tuple[int, ...], *, download: bool
) -> tuple[Dataset[Any], int]:
    """Return images of a folder, values in [0, 1], and the number of their classes.

    Args:
        kind: "cifar10", CIFAR-10's 50,000 images to train on; or "imagefolder", a folder of images
            for each class.
        root: The folder.
        shape: Shape of a sample.
        download: Whether to fetch CIFAR-10 into the folder.

    Raises:
        UsageError: The data set is missing or damaged.
    """
    datasets = needed("torchvision.datasets", f"--data {kind}:")
    to_tensor = needed("torchvision.transforms.functional", f"--data {kind}:").to_tensor

    def sample(image: Any) -> Tensor:
        return adapted(to_tensor(image)[None], shape)[0]

    with blamed(f"--data {kind}:{root} (--download fetches CIFAR-10)"):
        if kind == "cifar10":
            found = datasets.CIFAR10(root, transform=sample, download=download)
        else:
            found = datasets.ImageFolder(root, transform=sample)
    return found, len(found.classes)


def adapted(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bring images (samples, channels, height, width) to another sample shape.

    (C, H, W): resized, and grey in all channels if there are not as many; (T, K): the rows of a
    grey image as a sequence; (K,): a square image, grey or in colour, with K entries in a row.

    Raises:
        UsageError: The images can't be brought to that shape.
    """
    channels, *size = _image_of(shape)
    images = F.interpolate(images, size, mode="bilinear", antialias=True)
    if images.shape[1] != channels:
        images = images.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    return images.reshape(-1, *shape)


def _image_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return channels, height and width of an image of as many entries."""
    if len(shape) in (2, 3):
        return shape if len(shape) == 3 else (1, *shape)
    for channels in (1, 3) if len(shape) == 1 else ():
        side = isqrt(shape[0] // channels)
        if channels * side * side == shape[0]:
            return channels, side, side
    raise UsageError(
        f"--data: images can't be brought to the model's inputs of shape {shape}; expected "
        "(C, H, W), or as many entries as a square image has"
    )

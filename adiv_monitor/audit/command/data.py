"""Batches of a named data source or of the user's own, in the form that a model takes."""

from collections.abc import Callable, Mapping
from math import isqrt, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from adiv_monitor.audit.command.code import UsageError, blamed, imported, needed
from adiv_monitor.audit.command.models import MOST_CLASSES, Form, Shape, form, tokenizer
from adiv_monitor.audit.command.options import Config
from adiv_monitor.audit.run import MOST_STEPS
from adiv_monitor.audit.training.batches import is_data_set, loader_of, mapped, taken

_PLACES = 4  # cells of a class's pattern along each side of a random image
_WORDS = 64  # number of different random tokens
_SUCCESSORS = 4  # number of random tokens that may follow a token
_MOST_BATCHES = 32  # different batches of random data: more would only use memory
_RANDOM = (
    "The data were random: inputs that depend on their class, of mean 0 and standard deviation 1 "
    "where they are floats. What this says of inputs says nothing of yours."
)

Samples = tuple[Dataset[Any], int]  # pairs of a sample and its class, and the number of classes


def data(
    config: Config, model: nn.Module, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Any, ...], str | None, tuple[str, ...]]:
    """Return the batches that the config names, at most one per step, their loss, and notes.

    The loss is the name of one that fits the targets; None is the model's own.

    Raises:
        UsageError: There are no batches, or they don't fit the model.
    """

    def moved(tensor: Tensor) -> Tensor:
        # As from a usual loader: tensors that are not views into each other.
        return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()

    kind, _, argument = config.data.partition(":")
    found: Any
    loss: str | None = None
    notes = (_RANDOM,) * (kind == "random")
    with blamed(f"--data {config.data}"):
        if kind in SOURCES:
            shape, source = SOURCES[kind]
            fits = form(model, config, shape)
            samples, classes = source(config, fits, argument)
            if fits.classes is not None and classes > fits.classes:
                raise UsageError(
                    f"--data {config.data} has {classes} classes, the model has {fits.classes} "
                    f"outputs: give it more, as by --model-args '{{\"num_classes\": {classes}}}'"
                )
            loader = loader_of(samples, config.batch_size, config.seed)
            found, loss = (fits.batch(x, label) for x, label in loader), fits.loss
        else:
            found = imported(config.data, "--data", SOURCES)
            found = found() if callable(found) else found
        if is_data_set(found):
            found = loader_of(found, config.batch_size, config.seed)
            notes = (f"--data is a data set: shuffled, in batches of {config.batch_size} "
                     "(--batch-size).",)  # fmt: skip
        batches = tuple(
            mapped(batch, moved) for batch in taken(found, config.steps or MOST_STEPS, device)
        )
    if kind not in SOURCES and isinstance(batches[0], tuple | list):
        is_real = getattr(batches[0][-1], "is_floating_point", lambda: True)()
        loss = "mse" if is_real else "cross_entropy"
    return batches, loss, notes


def _random(config: Config, fits: Form, argument: str) -> Samples:
    """Return samples, each of which depends on its class and on random numbers.

    Floats are the mean of the class, itself drawn from a normal distribution, plus noise of the
    same size: mean 0, standard deviation 1. The mean of an image is smooth, so that it survives
    pooling. The next token is larger by a number that is the class's, or by up to three more.
    Sequences are one token longer than the model's inputs, so that each token has a next one.
    """
    shape, generator = fits.shape, torch.Generator().manual_seed(config.seed)
    classes = config.num_classes or min(MOST_CLASSES, fits.classes or MOST_CLASSES)
    count = config.batch_size * min(config.steps or MOST_STEPS, _MOST_BATCHES)
    labels = torch.randint(classes, (count,), generator=generator)
    if fits.vocabulary is not None:
        return TensorDataset(_chains(fits, labels, classes, generator), labels), classes
    is_image = len(shape) == 3 and min(shape[1:]) > _PLACES
    size = (shape[0], _PLACES, _PLACES) if is_image else shape
    means = torch.randn(classes, *size, generator=generator)
    if is_image:
        means = F.interpolate(means, shape[1:], mode="bicubic")
        means /= means.std()
    noise = torch.randn(count, *shape, generator=generator)
    return TensorDataset((means[labels] + noise) / 2**0.5, labels), classes


def _chains(fits: Form, labels: Tensor, classes: int, generator: torch.Generator) -> Tensor:
    """Return (samples, tokens + 1) whole numbers below the vocabulary size."""
    assert fits.vocabulary is not None
    words = min(_WORDS, fits.vocabulary)
    first = fits.vocabulary - words  # small numbers are often special tokens
    *places, length = fits.shape
    strides = torch.randint(words, (classes,), generator=generator)[labels]
    size = (len(labels), *places, length + 1)
    steps = torch.randint(_SUCCESSORS, size, generator=generator)
    steps += strides.reshape(-1, *(1 for _ in fits.shape))
    starts = torch.randint(words, (*size[:-1], 1), generator=generator)
    return (starts + steps.cumsum(-1)) % words + first


def _text(config: Config, fits: Form, file: str) -> Samples:
    """Return pieces of the text with the last token of each, and the number of tokens.

    A piece is one token longer than the model's inputs. The number of different tokens is one more
    than the largest token. Without a tokenizer each different byte of the file is a token, numbered
    from 0.
    """
    where, vocabulary, shape = f"--data text:{file}", fits.vocabulary, fits.shape
    if fits.classes is not None:
        raise UsageError(f"{where} has no labels for the model's classes")
    if vocabulary is None or len(shape) != 1:
        raise UsageError(f"{where}: expected a model that takes a sequence of tokens")
    content, as_tokens = Path(file).read_bytes(), tokenizer(config.model)
    if as_tokens is None:
        _, tokens = torch.unique(torch.tensor(list(content)), return_inverse=True)
    else:
        tokens = torch.tensor(as_tokens(content.decode("utf-8", "replace")), dtype=torch.long)
    length = shape[0] + 1
    if len(tokens) < length:
        raise UsageError(f"{where}: has {len(tokens)} tokens, expected at least {length}")
    if (different := int(tokens.max()) + 1) > vocabulary:
        raise UsageError(
            f"{where}: has {different} different tokens, the model's vocabulary is {vocabulary}; "
            "give it a larger one by --model-args"
        )
    pieces = tokens[: len(tokens) // length * length].reshape(-1, length)
    return TensorDataset(pieces, pieces[:, -1]), different


def _digits(config: Config, fits: Form, argument: str) -> Samples:
    """Return scikit-learn's 1,797 handwritten digits, 8 × 8 grey values in [0, 1]."""
    found = needed("sklearn.datasets", "--data digits").load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16
    return TensorDataset(_adapted(images, fits), torch.from_numpy(found.target).long()), 10


def _of_files(config: Config, fits: Form, root: str) -> Samples:
    """Return CIFAR-10's images to train on, or a folder with one of images for each class."""
    kind, _, _ = config.data.partition(":")
    datasets = needed("torchvision.datasets", f"--data {kind}:")
    to_tensor = needed("torchvision.transforms.functional", f"--data {kind}:").to_tensor

    def sample(image: Any) -> Tensor:
        return _adapted(to_tensor(image)[None], fits)[0]

    with blamed(f"--data {config.data} (--download fetches CIFAR-10)"):
        if kind == "cifar10":
            found = datasets.CIFAR10(root, transform=sample, download=config.download)
        else:
            found = datasets.ImageFolder(root, transform=sample)
    return found, len(found.classes)


def _adapted(images: Tensor, fits: Form) -> Tensor:
    """Bring images (samples, channels, height, width) to the model's inputs.

    (C, H, W): resized, and grey in all channels if there are not as many; (T, K): the rows of a
    grey image as a sequence; (K,): a square image, grey or in colour, with K entries in a row.
    """
    shape = fits.shape
    grey, colour = isqrt(shape[0]), isqrt(shape[0] // 3)
    forms = [shape, (1, *shape), (1, grey, grey), (3, colour, colour)]
    image = next((f for f in forms if len(f) == 3 and prod(f) == prod(shape)), None)
    if image is None or fits.vocabulary is not None:
        takes = "tokens" if fits.vocabulary else f"inputs of shape {shape}"
        raise UsageError(
            f"--data: images can't be brought to the model's {takes}; expected (C, H, W), or as "
            "many entries as a square image has"
        )
    images = F.interpolate(images, image[1:], mode="bilinear", antialias=True)
    if images.shape[1] != image[0]:
        images = images.mean(1, keepdim=True).expand(-1, image[0], -1, -1)
    return images.reshape(-1, *shape)


# Source → the shape of its samples, if the model's own is not known, and what makes them.
SOURCES: Mapping[str, tuple[Shape | None, Callable[[Config, Form, str], Samples]]] = {
    "random": (None, _random),
    "digits": ((1, 8, 8), _digits),
    "cifar10": ((3, 32, 32), _of_files),
    "imagefolder": ((3, 64, 64), _of_files),
    "text": ((32,), _text),
}

"""Random data with a dependence on classes that a model can learn."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from adiv_monitor.audit.sources.shapes import Inputs

_PLACES = 4  # cells of a class's pattern along each side of an image
_WORDS = 64  # number of different tokens
_SUCCESSORS = 4  # number of tokens that may follow a token


def examples(inputs: Inputs, classes: int, count: int, seed: int) -> TensorDataset:
    """Return samples and their classes; each sample depends on its class and on random numbers.

    Floats are the mean of the class, itself drawn from a normal distribution, plus noise of the
    same size: mean 0, standard deviation 1. The mean of an image is smooth, so that it survives
    pooling. Tokens are Markov chains, a different one for each class.

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
    follow = torch.randint(words, (classes, words, _SUCCESSORS), generator=generator)
    size = (len(labels), *places)
    label = labels.reshape(-1, *(1 for _ in places)).expand(size)
    tokens = [torch.randint(words, size, generator=generator)]
    for _ in range(length):
        choice = torch.randint(_SUCCESSORS, size, generator=generator)
        tokens.append(follow[label, tokens[-1], choice])
    return torch.stack(tokens, -1) + first

"""Data of the fault benchmark: digits that scikit-learn embeds, and generated data."""

import functools
import math

import torch
from audit.fault_benchmark.run import BATCHES
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


def minibatches(inputs: Tensor, targets: Tensor, size: int) -> Batches:
    """Shuffled minibatches of successive epochs."""
    found: Batches = []
    while len(found) < BATCHES:
        order = torch.randperm(len(inputs))
        found += [(inputs[rows], targets[rows]) for rows in order.split(size) if len(rows) == size]
    return found[:BATCHES]


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(pixels, dtype=torch.float32)
    pixels = pixels - pixels.mean(0)
    return pixels / pixels.std(), torch.tensor(labels)


def digits(size: int = 64) -> Batches:
    """Return images (64,) with mean 0 per pixel and variance 1 overall, in ten classes."""
    return minibatches(*_digits(), size)


def images(size: int = 32) -> Batches:
    """Return the digits as images (1, 8, 8)."""
    pixels, labels = _digits()
    return minibatches(pixels.reshape(-1, 1, 8, 8), labels, size)


def pictures(size: int = 64) -> Batches:
    """Return digits as their own targets."""
    pixels, _ = _digits()
    return minibatches(pixels, pixels, size)


def circles(size: int = 64) -> Batches:
    """Return points on two noisy circles, with variance 1, and their circles."""
    labels = torch.randint(2, (1024,))
    angles = 2 * math.pi * torch.rand(1024)
    radii = 1.0 - 0.5 * labels
    points = radii[:, None] * torch.stack([angles.cos(), angles.sin()], 1)
    points += 0.08 * torch.randn_like(points)
    return minibatches(points / points.std(), labels, size)


def blobs(size: int = 64) -> Batches:
    """Return four classes of two clouds each in eight standardised dimensions."""
    centres = 1.5 * torch.randn(8, 8)
    clouds = torch.randint(8, (1024,))
    points = centres[clouds] + torch.randn(1024, 8)
    points = (points - points.mean(0)) / points.std(0)
    return minibatches(points, clouds % 4, size)


def taught(size: int = 64) -> Batches:
    """Return inputs and outputs, of variance 1, of a random network from 16 to 3 features."""
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
    nn.init.normal_(teacher[0].weight, std=0.5)
    inputs = torch.randn(2048, 16)
    with torch.no_grad():
        answers = teacher(inputs)
    return minibatches(inputs, (answers - answers.mean(0)) / answers.std(0), size)


WORDS = 24


def text(length: int = 16, size: int = 16) -> Batches:
    """Return a Markov chain over 24 words with an entropy of about 1.4 nat per word."""
    following = (2.5 * torch.randn(WORDS, WORDS)).softmax(1)
    words = [torch.randint(WORDS, (1024,))]
    for _ in range(length):
        words.append(following[words[-1]].multinomial(1).squeeze(1))
    lines = torch.stack(words, 1)
    return minibatches(lines[:, :-1], lines[:, 1:], size)


VOCABULARY = 100


def topics(size: int = 32) -> Batches:
    """Return bags of 12 of 100 words, drawn from one of six topics."""
    share = (1.5 * torch.randn(6, VOCABULARY)).softmax(1)
    labels = torch.randint(6, (1024,))
    return minibatches(share[labels].multinomial(12, replacement=True), labels, size)


def counts(size: int = 32) -> Batches:
    """Return the same documents as centred counts of words, with variance 1 overall."""
    share = (1.5 * torch.randn(6, VOCABULARY)).softmax(1)
    labels = torch.randint(6, (1024,))
    words = share[labels].multinomial(12, replacement=True)
    counted = nn.functional.one_hot(words, VOCABULARY).sum(1).float()
    counted -= counted.mean(0)
    return minibatches(counted / counted.std(), labels, size)

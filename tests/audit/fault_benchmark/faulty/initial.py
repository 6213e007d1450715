"""Faults of the initialisation: weights, biases, activations and the resulting rows."""

from collections.abc import Callable

import torch
from audit.fault_benchmark import healthy
from audit.fault_benchmark.networks import initialise, layers, mlp
from audit.fault_benchmark.run import Run, case
from torch import nn

SCALE = "the initial scale of the weights is what makes the signal fade, or grow"
BIASES = "the units are dead because of the biases that they begin with"
FLAT = "at its flat end a tanh unit is both saturated and dead; the initial scale puts it there"
HIDDEN = "the initial biases are what gives the hidden rows a mean in which they interfere"
ALIKE = "equal weights get equal gradients, and zero ones pass none back"


def gain(value: float) -> Callable[[Run], None]:
    return lambda run: initialise(run.model, value)


def deep_sigmoid(run: Run) -> None:
    """Replace the network by eight sigmoid layers with torch's initialisation."""
    run.model = mlp([64] + [48] * 8 + [10], nn.Sigmoid)


def biases(value: float, share: float = 1) -> Callable[[Run], None]:
    """Change the biases of a share of the units of all layers but the head."""

    def plant(run: Run) -> None:
        with torch.no_grad():
            for layer in layers(run.model)[:-1]:
                layer.bias[: round(share * len(layer.bias))] = value

    return plant


def constant(value: float) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        with torch.no_grad():
            for layer in layers(run.model):
                layer.weight.fill_(value)
                layer.bias.zero_()

    return plant


def alike(mean: float, difference: float) -> Callable[[Run], None]:
    """Make all rows nearly equal."""

    def plant(run: Run) -> None:
        shared = mean * torch.randn(run.batches[0][0].shape[1:])
        run.batches = [(shared + difference * x, y) for x, y in run.batches]

    return plant


FADING = ("vanishing", "bad-initialisation")
GROWING = ("exploding", "bad-initialisation")
DEAD = ("dead-units", "bad-initialisation")
SATURATED = ("saturated-units", "dead-units", "bad-initialisation")
SYMMETRIC = ("bad-initialisation", "vanishing")
SHIFTED = ("interference", "bad-initialisation")
MEAN = ("interference", "input-mean")

CASES = [
    case(healthy.DEEP_TANH, "sigmoid, eight layers", deep_sigmoid, "vanishing"),
    case(healthy.DEEP_TANH, "gain 0.1", gain(0.1), *FADING, because=SCALE),
    case(healthy.DEEP_RELU, "gain 0.3", gain(0.3), *FADING, because=SCALE),
    case(healthy.DEEP_CNN, "gain 0.3", gain(0.3), *FADING, because=SCALE),
    case(healthy.DEEP_RELU, "gain 4", gain(4), *GROWING, because=SCALE),
    case(healthy.DEEP_CNN, "gain 6", gain(6), *GROWING, because=SCALE),
    case(healthy.MLP_ADAM, "gain 30", gain(30), *GROWING, because=SCALE),
    case(healthy.DEEP_TANH, "gain 20", gain(20), *SATURATED, because=FLAT),
    case(healthy.VIT, "gain 10", gain(10), *GROWING, because=SCALE),
    case(healthy.MLP_SGD, "biases -10", biases(-10), *DEAD, because=BIASES),
    case(healthy.CNN_SGD, "biases -5", biases(-5), *DEAD, because=BIASES),
    case(healthy.MLP_SGD, "7 of 8 biases -10", biases(-10, 7 / 8), *DEAD, because=BIASES),
    case(healthy.CNN_ADAM, "7 of 8 biases -10", biases(-10, 7 / 8), *DEAD, because=BIASES),
    case(healthy.MLP_ADAM, "all weights 0", constant(0), *SYMMETRIC, because=ALIKE),
    case(healthy.CNN_ADAM, "all weights 0.05", constant(0.05), *SYMMETRIC, because=ALIKE),
    case(
        healthy.MLP_SGD,
        "rows alike",
        alike(3, 0.3),
        *MEAN,
        because="the rows disturb each other because of the mean that they share",
    ),
    case(healthy.MLP_SGD, "hidden biases 5", biases(5), *SHIFTED, because=HIDDEN),
    case(healthy.CNN_SGD, "hidden biases 3", biases(3), *SHIFTED, because=HIDDEN),
]

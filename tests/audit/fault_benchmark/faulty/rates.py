"""Faults of the learning rate: of the whole model, and between its layers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from audit.fault_benchmark import healthy
from audit.fault_benchmark.networks import layers
from audit.fault_benchmark.run import Case, Healthy, Run, case
from torch import nn

HIGH = (
    (healthy.MLP_SGD, 100),
    (healthy.DEEP_TANH, 30),
    (healthy.CNN_SGD, 10),
    (healthy.RESNET, 100),
    (healthy.VIT, 30),
    (healthy.LSTM, 100),
    (healthy.AUTOENCODER, 30),
)
LOW = (
    (healthy.MLP_SGD, 0.001),
    (healthy.CNN_ADAM, 0.001),
    (healthy.VIT, 0.01),
    (healthy.GPT, 0.001),
    (healthy.LSTM, 0.01),
    (healthy.BAG, 0.01),
)
CAUSED_BY_SCALES = "the rates differ because of the scales at which the layers begin"


def times(factor: float) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        run.settings["lr"] *= factor

    return plant


def rescaled(first: int, factor: float) -> Callable[[Run], None]:
    """Scale one layer's weights up and the next one's down: a ReLU net computes the same."""

    def plant(run: Run) -> None:
        one, other = layers(run.model)[first : first + 2]
        with torch.no_grad():
            one.weight *= factor
            one.bias *= factor
            other.weight /= factor

    return plant


def own_rate(position: int, factor: float) -> Callable[[Run], None]:
    """Give one layer a parameter group with a rate of its own."""

    def plant(run: Run) -> None:
        lr = run.settings["lr"]

        def groups(model: nn.Module) -> Iterable[dict[str, Any]]:
            chosen = list(layers(model)[position].parameters())
            others = [p for p in model.parameters() if not any(p is c for c in chosen)]
            return [{"params": others}, {"params": chosen, "lr": factor * lr}]

        run.held = groups

    return plant


def _scales(twin: Healthy, first: int, factor: float) -> Case:
    what = f"layer {first + 1} × {factor:g}, next ÷ {factor:g}"
    expected = ("uneven-rates", "bad-initialisation")
    return case(twin, what, rescaled(first, factor), *expected, because=CAUSED_BY_SCALES)


CASES = [
    *(case(twin, f"rate × {by:g}", times(by), "rate-too-high") for twin, by in HIGH),
    *(case(twin, f"rate × {by:g}", times(by), "rate-too-low") for twin, by in LOW),
    _scales(healthy.MLP_SGD, 0, 30),
    _scales(healthy.DEEP_RELU, 3, 10),
    _scales(healthy.CNN_SGD, 0, 30),
    case(healthy.REGRESSION, "rate of layer 1 × 0.001", own_rate(0, 0.001), "group-rates"),
    case(healthy.CNN_SGD, "rate of the head × 30", own_rate(-1, 30), "group-rates"),
    case(healthy.MLP_ADAM, "rate of layer 1 × 0.001", own_rate(0, 0.001), "group-rates"),
    case(healthy.VIT, "rate of layer 2 × 100", own_rate(1, 100), "group-rates"),
]

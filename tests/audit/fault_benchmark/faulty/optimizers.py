"""Faults of the step: momentum, decay, projections and clipping."""

from collections.abc import Callable
from typing import Any

import torch
from audit.fault_benchmark import healthy
from audit.fault_benchmark.networks import layers
from audit.fault_benchmark.run import Run, case
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

INERTIA = "heavy momentum multiplies the rate by 1 / (1 − momentum)"
INSIDE = "a hook of the optimizer is a part of its step"


def settings(**values: Any) -> Callable[[Run], None]:
    return lambda run: run.settings.update(values)


def with_algorithm(algorithm: type[Optimizer], **values: Any) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        run.algorithm, run.settings = algorithm, values

    return plant


def clipped(norm: float) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        run.clip_norm = norm

    return plant


def project(model: nn.Module, radius: float) -> None:
    """Project the weights of each layer onto a ball."""
    with torch.no_grad():
        for layer in layers(model):
            layer.weight *= (radius / layer.weight.norm()).clamp(max=1)


def clamp(model: nn.Module, bound: float) -> None:
    """Clamp each weight to an interval, as in critics of Wasserstein networks."""
    with torch.no_grad():
        for layer in layers(model):
            layer.weight.clamp_(-bound, bound)


def before_forward(change: Callable[[nn.Module, float], None], by: float) -> Callable[[Run], None]:
    """Change the weights between two steps."""

    def plant(run: Run) -> None:
        loss = run.loss

        def changing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            change(model, by)
            return loss(model, batch)

        run.loss = changing

    return plant


def after_step(change: Callable[[nn.Module, float], None], by: float) -> Callable[[Run], None]:
    """Change the weights by a hook of the optimizer."""

    def plant(run: Run) -> None:
        algorithm, held, values = run.algorithm, run.held, run.settings

        def make(model: nn.Module) -> Optimizer:
            optimizer = algorithm(held(model), **values)
            optimizer.register_step_post_hook(lambda *_: change(model, by))
            return optimizer

        run.optimizer = make  # type: ignore[method-assign]

    return plant


TURNS, LOW, HIGH = "optimizer-turns", "rate-too-low", "rate-too-high"
DECAY, PROJECTION, CLIPPING = "decay-fights", "projection-fights", "clipping-always"
SLOW_ADAM = {"betas": (0.999, 0.999)}

CASES = [
    case(healthy.MLP_SGD, "momentum 0.99", settings(momentum=0.99), TURNS, HIGH, because=INERTIA),
    case(healthy.CNN_SGD, "momentum 0.99", settings(momentum=0.99), TURNS, HIGH, because=INERTIA),
    case(healthy.REGRESSION, "momentum 0.99, rate × 0.1", settings(momentum=0.99, lr=0.03), TURNS),
    case(healthy.MLP_ADAM, "betas 0.999", settings(**SLOW_ADAM), TURNS),
    case(healthy.MLP_SGD, "uphill", settings(maximize=True, lr=0.01), TURNS),
    case(healthy.MLP_ADAM, "epsilon 1", settings(eps=1.0), "settings-off"),
    case(healthy.MLP_SGD, "weight decay 1", settings(weight_decay=1.0), DECAY),
    case(healthy.CNN_SGD, "weight decay 0.3", settings(weight_decay=0.3), DECAY),
    case(healthy.VIT, "weight decay 30", settings(weight_decay=30.0), DECAY),
    case(healthy.CNN_ADAM, "coupled weight decay 1", settings(weight_decay=1.0), DECAY),
    case(healthy.MLP_SGD, "into a ball before each step", before_forward(project, 1), PROJECTION),
    case(healthy.CNN_ADAM, "clamped before each step", before_forward(clamp, 0.02), PROJECTION),
    case(healthy.VIT, "into a ball before each step", before_forward(project, 1), PROJECTION),
    case(
        healthy.GPT, "clamped by a hook", after_step(clamp, 0.01), PROJECTION, TURNS, because=INSIDE
    ),
    case(healthy.MLP_SGD, "clipped to 0.01", clipped(0.01), CLIPPING),
    case(healthy.CNN_SGD, "clipped to 0.03", clipped(0.03), CLIPPING),
    case(healthy.VIT_SGD, "clipped to 0.001", clipped(0.001), CLIPPING),
    case(healthy.MLP_SGD, "Adam at SGD's rate", with_algorithm(Adam, lr=0.3), HIGH),
]

"""Faults of the inputs: their scale, mean, features and lengths."""

from collections.abc import Callable, Iterator

import torch
from audit.fault_benchmark import healthy
from audit.fault_benchmark.run import Case, Healthy, Run
from torch import Tensor

MEAN_INTERFERES = "the rows disturb each other because of the mean that they share"


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[Run], None]:
    def plant(run: Run) -> None:
        run.batches = [(change(inputs), targets) for inputs, targets in run.batches]

    return plant


def scaled(factor: float) -> Callable[[Run], None]:
    return changed(lambda inputs: factor * inputs)


def shifted(by: float) -> Callable[[Run], None]:
    return changed(lambda inputs: inputs + by)


def one_feature(factor: float) -> Callable[[Run], None]:
    """Measure one feature in another unit."""

    def change(inputs: Tensor) -> Tensor:
        factors = torch.ones(inputs.shape[1])
        factors[0] = factor
        return factors * inputs

    return changed(change)


def unequal(spread: float) -> Callable[[Run], None]:
    """Multiply each sample by a log-normal exposure of mean square 1."""

    def change(inputs: Tensor) -> Tensor:
        exposure = (spread * torch.randn(len(inputs)) - spread**2).exp()
        return inputs * exposure.reshape(-1, *[1] * (inputs.dim() - 1))

    return changed(change)


def rare_long(factor: float) -> Callable[[Run], None]:
    """Make one sample of 32 far longer than the others."""

    def change(inputs: Tensor) -> Tensor:
        length = torch.ones(len(inputs))
        length[::32] = factor
        return inputs * length.reshape(-1, *[1] * (inputs.dim() - 1))

    return changed(change)


def _on(twins: tuple[Healthy, ...], what: str, finding: str, plant: Callable[[Run], None]) -> None:
    CASES.extend(Case(f"{twin.name}: {what}", twin, (finding,), plant) for twin in twins)


def _uncentred() -> Iterator[Case]:
    strengths = (
        (healthy.MLP_SGD, 3),
        (healthy.MLP_ADAM, 10),
        (healthy.CNN_SGD, 3),
        (healthy.REGRESSION, 3),
        (healthy.VIT_SGD, 30),
    )
    for twin, by in strengths:
        expected = ("input-mean", "interference")
        name = f"{twin.name}: inputs + {by}"
        yield Case(name, twin, expected, shifted(by), because=MEAN_INTERFERES)


CASES: list[Case] = []
_on(
    (healthy.MLP_SGD, healthy.CNN_SGD, healthy.CNN_ADAM, healthy.VIT),
    "inputs × 160",
    "input-scale",
    scaled(160),
)
_on((healthy.REGRESSION,), "inputs × 8", "input-scale", scaled(8))
_on(
    (healthy.MLP_SGD, healthy.CNN_SGD, healthy.VIT_SGD),
    "inputs × 0.01",
    "input-scale",
    scaled(0.01),
)
CASES += _uncentred()
_on((healthy.BLOBS, healthy.REGRESSION), "one feature × 100", "input-scale", one_feature(100))
_on((healthy.MLP_SGD, healthy.CNN_SGD), "exposure ×/÷ e^1.5", "row-spread", unequal(1.5))
_on(
    (healthy.MLP_SGD, healthy.VIT_SGD),
    "exposure ×/÷ e^1",
    "row-spread",
    unequal(1),
)
_on(
    (healthy.REGRESSION, healthy.MLP_SGD),
    "one row of 32 × 30",
    "row-spread",
    rare_long(30),
)

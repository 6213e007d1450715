"""Faults of the inputs: their scale, mean, features and lengths."""

from collections.abc import Callable

import torch
from audit.fault_benchmark import healthy
from audit.fault_benchmark.run import Run, case
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


SHIFTED = ("input-mean", "interference")
CASES = [
    *(case(twin, "inputs × 160", scaled(160), "input-scale")
      for twin in (healthy.MLP_SGD, healthy.CNN_SGD, healthy.CNN_ADAM, healthy.VIT)),
    case(healthy.REGRESSION, "inputs × 8", scaled(8), "input-scale"),
    *(case(twin, "inputs × 0.01", scaled(0.01), "input-scale")
      for twin in (healthy.MLP_SGD, healthy.CNN_SGD, healthy.VIT_SGD)),
    *(case(twin, f"inputs + {by}", shifted(by), *SHIFTED, because=MEAN_INTERFERES)
      for twin, by in ((healthy.MLP_SGD, 3), (healthy.MLP_ADAM, 10), (healthy.CNN_SGD, 3),
                       (healthy.REGRESSION, 3), (healthy.VIT_SGD, 30))),
    *(case(twin, "one feature × 100", one_feature(100), "input-scale")
      for twin in (healthy.BLOBS, healthy.REGRESSION)),
    *(case(twin, "exposure ×/÷ e^1.5", unequal(1.5), "row-spread")
      for twin in (healthy.MLP_SGD, healthy.CNN_SGD)),
    *(case(twin, "exposure ×/÷ e^1", unequal(1), "row-spread")
      for twin in (healthy.MLP_SGD, healthy.VIT_SGD)),
    *(case(twin, "one row of 32 × 30", rare_long(30), "row-spread")
      for twin in (healthy.REGRESSION, healthy.MLP_SGD)),
]  # fmt: skip

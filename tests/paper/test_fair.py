"""The fair test: tuning on images held out, paired differences, and the command."""

import math
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import fair
import fair_report
from experiment import Experiment
from fair_report import Arm
from training import Run, Setting

TANH = Arm("standard", "tanh", 128)


def run(arm: Arm, rate: float, accuracy: float, seed: int = 0) -> Run:
    return {
        **arm._asdict(),
        "learning_rate": rate,
        "seed": seed,
        "epoch": [1],
        "test_accuracy": [accuracy],
        "train_accuracy": [accuracy + 1],
        "pixels": "centred",
        "optimizer": "sgd",
        "width": 32,
        "depth": 2,
        "data": "x",
    }


class Tuned(Experiment):
    """An experiment whose accuracies have a peak at a stated place of the grid."""

    def __init__(self, peak: float) -> None:
        self.peak = peak
        self.tried: list[float] = []

    def train(self, settings: Any) -> list[Run]:
        (setting,) = settings
        assert isinstance(setting, Setting)
        assert (setting.optimizer, setting.pixels) == ("sgd", "centred")
        self.tried = [network.learning_rate for network in setting.networks]
        return [
            run(TANH, rate, -abs(2 * math.log10(rate) - self.peak) + seed, seed)
            for rate in self.tried
            for seed in (0, 1)
        ]


@pytest.mark.parametrize(
    ("peak", "lowest", "highest"),
    [(-3, -5, -2), (-5, -6, -2), (-7, -8, -2), (-20, -9, -2), (0, -5, 1), (9, -5, 2)],
)
def test_the_grid_is_widened_until_the_best_is_inside(peak: int, lowest: int, highest: int) -> None:
    experiment = Tuned(peak)
    chosen = fair.tune(experiment, [TANH], 1)
    assert experiment.tried == [fair.rate(k) for k in range(lowest, highest + 1)]
    assert chosen == {TANH: fair.rate(min(max(peak, lowest), highest))}


def test_a_claim_is_judged_by_the_mean_over_batch_sizes_of_every_seed() -> None:
    """One p-value a claim, not one a batch size; Holm corrects for the number of claims."""
    found = {
        TANH: {0: 50.0, 1: 50.0},
        TANH._replace(batch_size=8): {0: 40.0, 1: 42.0, 2: 44.0},
        TANH._replace(method="affine-like"): {0: 52.0, 1: 53.0},
        TANH._replace(method="affine-like", batch_size=8): {0: 41.0, 1: 43.0, 2: 40.0},
    }
    claim = fair_report.Claim("affine-like", "standard", "theory")
    assert fair_report.together(found, claim, "tanh") == [1.5, 2.0]
    assert fair_report.together(found, claim, "leaky") == []
    assert fair_report.chance([1.5, 2.0]) == pytest.approx(1 - 2 * math.atan(7) / math.pi)
    assert math.isnan(fair_report.chance([]))

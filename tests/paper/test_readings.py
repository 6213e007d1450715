"""What readings and accuracies say together: rank correlations, lines, and claims of pairs."""

import math
import random
from typing import Any

import fair_report
import pytest
import readings
from cifar import Data, synthetic
from ensemble import Network
from readings_report import MEASURES, correlation
from scipy import stats
from slopes import Arm, holm
from training import Course, Setting

from adiv_monitor import Monitor

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def data() -> Data:
    return synthetic(train=96, test=40)


def test_what_is_read_is_what_the_monitor_reports(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all steps, as few as they are."""
    kept: list[Monitor] = []

    class Kept(Monitor):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            kept.append(self)

    monkeypatch.setattr(readings, "Monitor", Kept)
    network = Network("affine-like", "tanh", 0, 0.5)
    setting = Setting(32, 32, 2, "centred", (network,), "sgd")
    run = readings.train(network, setting, Course(setting, data), 1)
    (monitor,) = kept
    assert run["step"] == [report.step for report in monitor.reports] == [0, 1, 2]
    for measure in MEASURES:
        layers = zip(*(report.layers.values() for report in monitor.reports), strict=True)
        expected = [[getattr(reading, measure) for reading in layer] for layer in layers]
        for mine, theirs in zip(run[measure], expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4), measure
        assert len(expected) == 3
    # All rows of an affine-like map move by the same factor.
    assert run["scale_cv"][1] == pytest.approx([0] * 3, abs=1e-6)


def test_a_rank_correlation() -> None:
    drawn = random.Random(0)
    x = [drawn.random() for _ in range(40)]
    y = [math.exp(value + drawn.random()) for value in x]
    found = correlation(x, y)
    assert found.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert found.low < found.value < found.high
    r = found.value
    reach = 1.959964 * math.sqrt((1 + r * r / 2) / 37)
    assert math.atanh(found.high) == pytest.approx(math.atanh(r) + reach, rel=1e-5)
    assert math.atanh(found.low) == pytest.approx(math.atanh(r) - reach, rel=1e-5)
    assert correlation(x, [-value for value in x]).value == -1
    assert correlation([1, 2, 3], [1, 3, 2]).value != correlation([1, 2, 3], [1, 3, 2]).value  # NaN
    assert correlation([*x, math.nan], [*y, 1.0]) == found


def test_a_line_and_its_errors() -> None:
    """A bend that all seeds share is no error of the slope."""
    bent = {0: 51.0, 1: 47.5, 2: 50.0}  # 1, −2, 1 around 50 − x/2
    accuracies = {x: {seed: a + seed * (1 + x) for seed in (0, 1)} for x, a in bent.items()}
    accuracies[1][2] = 90.0  # a seed without the other batch sizes
    line = Arm("standard", "tanh", 1e-3, accuracies).line()
    assert line is not None and line.seeds == 2
    # Of the seeds: 50 − x/2 and 51 + x/2.
    assert (line.intercept, line.slope) == pytest.approx((50.5, 0))
    assert (line.intercept_error, line.slope_error) == pytest.approx((0.5, 0.5))
    line = line._replace(slope=-0.5)
    # Student's t with one degree of freedom is Cauchy's.
    assert line.chance(-1) == pytest.approx(0.25)
    assert line.chance(1) == pytest.approx(0.75)


def test_p_values_are_corrected_for_their_number() -> None:
    # Of 0.01, 0.04, 0.03: 3 · 0.01; 2 · 0.03; and 0.04 is not less than the one before it.
    corrected = holm([0.01, math.nan, 0.04, 0.03])
    assert corrected[0] == pytest.approx(0.03) and math.isnan(corrected[1])
    assert corrected[2:] == pytest.approx([0.06, 0.06])


def test_a_claim_is_judged_by_the_mean_over_batch_sizes_of_every_seed() -> None:
    """One p-value a claim, not one a batch size; Holm corrects for the number of claims."""
    standard = fair_report.Arm("standard", "tanh", 128)
    found = {
        standard: {0: 50.0, 1: 50.0},
        standard._replace(batch_size=8): {0: 40.0, 1: 42.0, 2: 44.0},
        standard._replace(method="affine-like"): {0: 52.0, 1: 53.0},
        standard._replace(method="affine-like", batch_size=8): {0: 41.0, 1: 43.0, 2: 40.0},
    }
    claim = fair_report.Claim("affine-like", "standard", "theory")
    assert fair_report.together(found, claim, "tanh") == [1.5, 2.0]
    assert fair_report.together(found, claim, "leaky") == []
    assert fair_report.chance([1.5, 2.0]) == pytest.approx(1 - 2 * math.atan(7) / math.pi)
    assert math.isnan(fair_report.chance([]))

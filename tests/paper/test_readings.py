"""What the paper's runs read is what the monitor reports."""

from typing import Any

import pytest
import readings
from cifar import Data, synthetic
from ensemble import Network
from readings_report import MEASURES
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

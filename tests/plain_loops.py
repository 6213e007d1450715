"""Reports of a trainer's callback beside those of a monitor in a plain loop."""

import pytest

from adiv_monitor import StepReport


def assert_same(ours: list[StepReport], expected: list[StepReport]) -> None:
    """Assert that both have the same steps, losses and readings."""
    assert [report.step for report in ours] == [report.step for report in expected]
    for one, other in zip(ours, expected, strict=True):
        assert one.layers.keys() == other.layers.keys()
        assert (one.coverage, one.unsupported) == (other.coverage, other.unsupported)
        assert one.losses == pytest.approx(other.losses, rel=1e-4)
        assert one.loss is not None
        # A Trainer may have one parameter group with decay and one without.
        assert one.learning_rates and set(one.learning_rates) == set(other.learning_rates)
        for path, reading in one.layers.items():
            assert reading.measures() == pytest.approx(
                other.layers[path].measures(), rel=1e-4, abs=1e-6, nan_ok=True
            )


def losses_of(reports: list[StepReport]) -> dict[int, float]:
    """Return the loss of every step."""
    return {step: loss for report in reports for step, loss in report.losses.items()}

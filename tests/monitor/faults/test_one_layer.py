"""A layer that fails is named in every report."""

import pytest
from faults.scenarios import SCENARIOS
from faults.trial import REASON, Fault, take, unmonitored

from adiv_monitor.capture import watching

DEEP = SCENARIOS["deep"]


def test_the_reason_is_in_every_report_where_the_layer_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reason is reported even if the rule fails before its layer is known."""

    def fails(*_: object) -> None:
        raise Fault(REASON)

    monkeypatch.setattr(watching, "uses_in", fails)
    trial = take(DEEP)
    assert trial.result == unmonitored("deep")
    for report in trial.reports:
        assert not report.layers
        assert len(report.unsupported) == 4
        assert all(REASON in reason for reason in report.unsupported.values()), report.unsupported
    assert len(trial.warned) == 4

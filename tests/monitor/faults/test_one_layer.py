"""Work that fails for several layers is retried per layer; one failing layer spares the others."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from faults.scenarios import SCENARIOS
from faults.trial import REASON, Fault, Trial, take, unmonitored

from adiv_monitor.capture import watching
from adiv_monitor.step import vectors

DEEP = SCENARIOS["deep"]
PATHS = ["0", "1", "2", "3"]


def measures(trial: Trial) -> list[dict[str, dict[str, float]]]:
    return [{p: r.measures() for p, r in report.layers.items()} for report in trial.reports]


def test_out_of_memory_for_several_layers_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = measures(take(DEEP, on_error="raise"))
    for kind in (vectors.Family, vectors.Block):  # the second with several of the first

        def without_room(
            self: Any, of: Sequence[object], *, make: Any = kind.__init__, **options: bool
        ) -> None:
            if len(of) > 1:
                raise torch.OutOfMemoryError(REASON)
            make(self, of, **options)

        monkeypatch.setattr(kind, "__init__", without_room)
        found = measures(take(DEEP, on_error="raise"))
        assert [list(report) for report in found] == [PATHS, PATHS]
        for one, other in zip(found, expected, strict=True):
            for path in PATHS:
                assert one[path] == pytest.approx(other[path], rel=1e-12, nan_ok=True)


def test_a_layer_whose_rows_can_not_be_stacked_is_the_only_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = vectors.Family.__init__

    def fails(self: vectors.Family, layers: Sequence[vectors.LayerInProgress]) -> None:
        if any(x.layer.path == "1" for x in layers):
            raise Fault(REASON)
        make(self, layers)

    monkeypatch.setattr(vectors.Family, "__init__", fails)
    trial = take(DEEP)
    assert trial.result == unmonitored("deep")
    for report in trial.reports:
        assert list(report.layers) == ["0", "2", "3"]
        assert REASON in report.unsupported["1"]
    assert len(trial.warned) == 1


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

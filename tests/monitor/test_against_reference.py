"""Every measure against a slow reference that really takes the step; float64, to 1e-9."""

import copy
from functools import partial
from typing import Any

import pytest
import reference
import torch
from cases import CASES, OPTIMIZERS, loss_of

from adiv_monitor import Monitor
from adiv_monitor.measured_step import MeasuredStep
from adiv_monitor.report import MEASURES

STEPS = 3
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def seen_rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, list[int]]]:
    """For every measured step, the rows that the monitor chose, numbered over all calls."""
    steps: list[dict[str, list[int]]] = []
    original = MeasuredStep.gradient_is_final

    def spy(self: MeasuredStep, *args: Any, **kwargs: Any) -> None:
        chosen: dict[str, list[int]] = {}
        for path, rows in self._capture.rows.items():
            offset, chosen[path] = 0, []
            for call in rows.calls:
                index = call.rows.index
                picked = range(call.rows.total) if index is None else index.tolist()
                chosen[path] += [offset + i for i in picked]
                offset += call.rows.total
        steps.append(chosen)
        original(self, *args, **kwargs)

    monkeypatch.setattr(MeasuredStep, "gradient_is_final", spy)
    return steps


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("max_rows", [None, 5], ids=["all-rows", "sampled"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_every_measure(
    case: str,
    optimizer: str,
    max_rows: int | None,
    micro_batches: int,
    seen_rows: list[dict[str, list[int]]],
) -> None:
    model = CASES[case].model()
    twin = copy.deepcopy(model)
    batches = CASES[case].batches(STEPS * micro_batches)
    steps = [batches[i * micro_batches : (i + 1) * micro_batches] for i in range(STEPS)]

    def backward(model: torch.nn.Module, step: list[Batch]) -> None:
        for batch in step:
            (loss_of(model, batch) / micro_batches).backward()

    twin_optimizer = OPTIMIZERS[optimizer](twin.parameters())
    truths = []
    for step in steps:
        truths.append(reference.take_step(twin, twin_optimizer, partial(backward, step=step)))

    own = OPTIMIZERS[optimizer](model.parameters())
    with Monitor(
        model, own, every_n_steps=1, max_rows=max_rows, attainable=True, on_error="raise"
    ) as monitor:
        for step in steps:
            own.zero_grad()
            backward(model, step)
            own.step()

    assert len(monitor.reports) == STEPS
    for report, truth, rows in zip(monitor.reports, truths, seen_rows, strict=True):
        assert report.layers.keys() == truth.keys()
        assert report.coverage == 1.0
        assert not report.unsupported
        assert not report.notes
        for path, reading in report.layers.items():
            expected = reference.measures(truth[path], rows[path])
            if report.step == 0 and optimizer == "sgd":
                expected["attainable_cosine"] = reference.attainable_cosine(truth[path])
            assert reading.rows_total == len(truth[path].G)
            assert reading.rows_seen == len(rows[path])
            assert max_rows is None or reading.rows_seen <= max_rows
            for name, value in expected.items():
                assert getattr(reading, name) == pytest.approx(
                    value, rel=1e-9, abs=1e-9, nan_ok=True
                ), f"{name} of {path} at step {report.step}"
            assert set(expected) >= set(MEASURES) - {"attainable_cosine"}

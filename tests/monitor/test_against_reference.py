"""Every measure agrees with a slow reference that really takes the step; float64, to 1e-9.

Over all rows every measure is exact. Over sampled rows, the measures documented as exact are.
"""

from functools import cache, partial

import pytest
import reference
import torch
from cases import CASES, OPTIMIZERS, loss_of

from adiv_monitor import Monitor
from adiv_monitor.report import MEASURES, REALISED_MEASURES

STEPS = {1: 3, 3: 2}  # steps by micro-batches; few, as the reference is slow
Batch = tuple[torch.Tensor, torch.Tensor]
Truth = dict[str, reference.LayerTruth]
# Gains have no scales from one pass.
SAMPLED = reference.SAMPLED
SAMPLED_OF_GAINS = SAMPLED | {
    *("diagonal_cosine", "scale_mean", "scale_cv", "scale_max"),
    *("idle_share", "activation_gradient_rms"),
}


def made(case: str, micro_batches: int) -> tuple[torch.nn.Module, list[list[Batch]]]:
    """Return a model and the micro-batches of every step, the same at every call."""
    model, count = CASES[case].model(), STEPS[micro_batches]
    batches = CASES[case].batches(count * micro_batches)
    return model, [batches[i * micro_batches : (i + 1) * micro_batches] for i in range(count)]


def backward(model: torch.nn.Module, step: list[Batch]) -> None:
    for batch in step:
        (loss_of(model, batch) / len(step)).backward()


@cache
def truths_of(case: str, optimizer: str, micro_batches: int) -> list[Truth]:
    """Return the truth of every step: slow, so cached for all values of `max_rows`."""
    model, steps = made(case, micro_batches)
    own = OPTIMIZERS[optimizer](model.parameters())
    return [reference.take_step(model, own, partial(backward, step=step)) for step in steps]


@pytest.mark.slow(one_in=13)
@pytest.mark.parametrize("max_rows", [None, 5], ids=["all-rows", "sampled"])
@pytest.mark.parametrize("micro_batches", STEPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_every_measure(case: str, optimizer: str, micro_batches: int, max_rows: int | None) -> None:
    truths = truths_of(case, optimizer, micro_batches)
    model, steps = made(case, micro_batches)
    own = OPTIMIZERS[optimizer](model.parameters())
    asked = {"max_rows": max_rows, "attainable": max_rows is None}  # this takes all rows
    with Monitor(model, own, every_n_steps=1, on_error="raise", **asked) as monitor:
        for step in steps:
            own.zero_grad()
            backward(model, step)
            own.step()

    assert len(monitor.reports) == len(steps)
    for report, truth in zip(monitor.reports, truths, strict=True):
        assert report.layers.keys() == truth.keys()
        assert report.coverage == 1.0
        assert not report.unsupported
        assert not report.notes
        for path, reading in report.layers.items():
            expected = reference.measures(truth[path])
            expected["update_rms"] /= own.param_groups[0]["lr"]
            if report.step == 0 and optimizer == "sgd" and max_rows is None:
                expected["attainable_cosine"] = reference.attainable_cosine(truth[path])
            total = len(truth[path].G)
            assert reading.rows_total == total
            assert reading.rows_seen == min(total, max_rows or total)
            whole = reading.rows_seen == total
            grouped = truth[path].scale.shape[1] > 1
            allowed = set() if whole else SAMPLED_OF_GAINS if grouped else SAMPLED
            assert reading.standard_error.keys() <= allowed
            unknown = {"scale_p05", "scale_p50", "scale_p95"} if grouped else set()
            assert not [name for name in unknown if getattr(reading, name) is not None]
            for name in expected.keys() - allowed - unknown:
                assert getattr(reading, name) == pytest.approx(
                    expected[name], rel=1e-9, abs=1e-9, nan_ok=True
                ), f"{name} of {path} at step {report.step}"
            elsewhere = {name for name in MEASURES if "expert" in name}  # see test_sizes.py
            elsewhere |= {"attainable_cosine", *REALISED_MEASURES}
            assert set(expected) >= set(MEASURES) - elsewhere

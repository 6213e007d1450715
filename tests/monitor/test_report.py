"""A report's summary of its layers: extremes, worst layers, unmeasured parameters."""

import math
import random
from statistics import fmean, pstdev

import pytest
import torch
from computes import Computes
from example_reports import attention, reading, report
from torch import nn
from torch.nn.parameter import is_lazy

from adiv_monitor import LayerReading, Monitor, StepReport
from adiv_monitor.report import ATTENTION_MEASURES, smallest
from adiv_monitor.sinks.scalars import summary_scalars


def of(values: dict[str, float], errors: dict[str, float] | None = None) -> StepReport:
    """Return a report of layers with these values of `update_cosine`."""
    layers = {
        layer: LayerReading(
            *("linear", 64, 6400, 0, 1.0),
            update_cosine=value,
            standard_error={"update_cosine": (errors or {}).get(layer, 0.0)},
        )
        for layer, value in values.items()
    }
    return report(layers=layers)


# The extreme layers


def test_exact_values_are_told_apart() -> None:
    summary = of({"a": 0.3, "b": 0.1, "c": 0.2}).summary()["update_cosine"]
    assert (summary.min, summary.median, summary.max) == (0.1, 0.2, 0.3)
    assert (summary.min_layers, summary.max_layers) == (("b",), ("a",))
    assert (summary.min_layer, summary.max_layer) == ("b", "a")


@pytest.mark.parametrize(("gap", "told"), [(0.099, False), (0.101, True)])
def test_two_combined_errors_tell_two_layers_apart(gap: float, told: bool) -> None:
    values, errors = {"a": 0.2, "b": 0.2 + gap}, {"a": 0.03, "b": 0.04}  # combined 0.05
    summary = of(values, errors).summary()["update_cosine"]
    assert summary.min_layer == ("a" if told else None)
    assert summary.max_layer == ("b" if told else None)
    assert summary.min_layers == (("a",) if told else ("a", "b"))


def test_a_third_layer_of_large_error_may_be_the_worst_too() -> None:
    """A layer with a large error is listed, although one with a nearer value is excluded."""
    values, errors = {"a": -0.1, "b": 0.0, "c": 0.05}, {"a": 0.01, "b": 0.01, "c": 0.2}
    assert of(values, errors).summary()["update_cosine"].min_layers == ("a", "c")


# The extreme values


def test_layers_not_told_apart_share_the_value_that_fits_them_best() -> None:
    value, layers = smallest([(0.1, 0.1, "a"), (0.2, 0.05, "b"), (0.9, 0.1, "c")])
    assert layers == ("a", "b")
    assert value == pytest.approx((0.1 / 0.01 + 0.2 / 0.0025) / (1 / 0.01 + 1 / 0.0025))


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("count", [4, 60])
def test_noise_moves_no_extreme_and_names_no_layer(count: int) -> None:
    """Extremes of equal layers with an error of 0.05, which may stop a training, ignore noise."""
    draw, true, error = random.Random(count), 0.3, 0.05
    raw, ours, named = [], [], 0
    for _ in range(200):
        noisy = of(
            {str(i): draw.gauss(true, error) for i in range(count)},
            dict.fromkeys(map(str, range(count)), error),
        )
        values = [r.update_cosine for r in noisy.layers.values()]
        scalars = summary_scalars(noisy, ["update_cosine"])
        raw.append((min(values) - true, max(values) - true))
        ours.append([scalars[f"adiv.summary/update_cosine_{end}"] - true for end in ("min", "max")])
        summary = noisy.summary()["update_cosine"]
        named += (summary.min_layer is not None) + (summary.max_layer is not None)
    for of_raw, of_ours in zip(zip(*raw, strict=True), zip(*ours, strict=True), strict=True):
        assert abs(fmean(of_ours)) < 0.3 * abs(fmean(of_raw)), "beyond the true value"
        assert pstdev(of_ours) < 0.9 * pstdev(of_raw), "to and fro"
    assert named / 400 < 0.03


# Flat records


def test_rows_are_flat_and_have_the_same_columns() -> None:
    layers = {
        "sampled": reading(standard_error={"update_cosine": 0.02, "row_cosine_mean": math.nan}),
        "whole": reading(descent=None),
    }
    sampled, whole = report(7, layers=layers).to_rows()
    assert not any(isinstance(value, dict | list | tuple) for value in sampled.values())
    assert (sampled["step"], sampled["layer"], sampled["kind"]) == (7, "sampled", "linear")
    assert sampled["update_cosine_standard_error"] == 0.02
    assert math.isnan(sampled["row_cosine_mean_standard_error"])
    assert whole["update_cosine_standard_error"] == 0.0
    errors = [column for column in whole if column.endswith("_standard_error")]
    assert errors == ["update_cosine_standard_error", "row_cosine_mean_standard_error"]
    assert sampled.keys() - whole.keys() == {"descent"}


# The measured share of the trained parameters


def measured(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: object
) -> StepReport:
    with Monitor(model, optimizer, on_error="raise", **options) as monitor:  # type: ignore[arg-type]
        parameter = next(model.parameters())
        model(torch.ones(2, 3, dtype=parameter.dtype)).square().sum().backward()
        monitor.end_step() if optimizer is None else optimizer.step()
        for p in filter(lambda p: not is_lazy(p), model.parameters()):
            p.requires_grad_(False)  # as Lightning's `toggle_optimizer` does
    return monitor.latest


def two() -> nn.Sequential:
    """Return two layers, and a module with an unused parameter."""
    spare = Computes(lambda module, x: x, weight=nn.Parameter(torch.ones(2)))
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), spare)


def test_coverage_counts_layers_that_were_not_chosen() -> None:
    model = two()
    found = measured(model, torch.optim.SGD(model.parameters(), 0.1), layers=["0", "2"])
    assert found.coverage == pytest.approx(20 / 34)
    assert found.unmeasured == {"2.weight": 2}, "of what was asked for"
    assert found.unsupported.keys() == {"2"}


def test_what_the_optimizer_trains_outside_the_model_counts() -> None:
    model, temperature = nn.Linear(3, 2), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
    found = measured(model, optimizer)
    assert found.coverage == pytest.approx(8 / 12)
    assert found.unmeasured == {"optimizer parameter 2": 4}
    assert "not in the monitored model" in found.unsupported["optimizer parameter 2"]


# Attention


def test_attention_as_rows_has_one_per_head() -> None:
    found = report(7, attention={"a": attention(1), "b": attention(2)})
    rows = found.attention_rows()
    assert [(r["step"], r["attention"], r["head"]) for r in rows] == [
        *((7, "a", 0), (7, "a", 1), (7, "b", 0), (7, "b", 1))
    ]
    for row, (path, head) in zip(rows, (("a", 0), ("a", 1), ("b", 0), ("b", 1)), strict=True):
        reading = found.attention[path]
        assert {m: row[m] for m in ATTENTION_MEASURES} == {
            m: values[head] for m, values in reading.heads.items()
        }
        assert row["attention_scale_mean_standard_error"] == (0.02, 0.03)[head]
    assert report().attention_rows() == []


# The loss, learning rates and classes of modules

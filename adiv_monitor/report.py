"""What the monitor says: plain, frozen data, no tensors and nothing to compute.

A measure is a float. NaN means "no direction" (a zero vector has none; it is shown as "–"), None
means "not asked for, or not defined for this layer". The definitions are in `measures.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

# Equally spaced levels, 0 to 1, at which the distributions over rows are kept for histograms.
QUANTILE_LEVELS = tuple(i / 32 for i in range(33))


@dataclass(frozen=True)
class LayerReading:
    """One layer at one step.

    Attributes:
        kind: how the layer is linear in its parameters, e.g. "linear", "convolution".
        rows_seen: rows that were looked at.
        rows_total: rows that received a gradient in this step, over all micro-batches and calls.
        rows_without_gradient: rows seen whose gradient is exactly zero (padding, masked tokens):
            idle rows, which all measures but `idle_share` leave out.
        gradient_factor: what happened to the gradient between the backward pass and the step:
            ‖gradient the optimizer saw‖ / ‖gradient that backward left‖. 1 when nothing did;
            below 1 after clipping, 1/65536 after unscaling an AMP loss; NaN where it can't be told.
        standard_error: measure → standard error, for those measures that rest on sampled rows; the
            others are exact.
        scale_quantiles: the row scale at `QUANTILE_LEVELS`.
        row_cosine_quantiles: the row cosine at `QUANTILE_LEVELS`.

    All other attributes are the measures of `measures.py`, under their names there.
    """

    kind: str
    rows_seen: int
    rows_total: int
    rows_without_gradient: int
    gradient_factor: float
    update_cosine: float | None = None
    gradient_cosine: float | None = None
    diagonal_cosine: float | None = None
    attainable_cosine: float | None = None
    effective_lr: float | None = None
    scale_mean: float | None = None
    scale_cv: float | None = None
    scale_p05: float | None = None
    scale_p50: float | None = None
    scale_p95: float | None = None
    scale_max: float | None = None
    common_share: float | None = None
    interference_ratio: float | None = None
    row_cosine_mean: float | None = None
    row_cosine_p05: float | None = None
    row_cosine_p50: float | None = None
    row_cosine_p95: float | None = None
    harmed_fraction: float | None = None
    idle_share: float | None = None
    bias_share: float | None = None
    update_ratio: float | None = None
    descent: float | None = None
    parameter_cosine: float | None = None
    projection_cosine: float | None = None
    applied_cosine: float | None = None
    standard_error: Mapping[str, float] = field(default_factory=dict)
    scale_quantiles: tuple[float, ...] = field(default=(), repr=False)
    row_cosine_quantiles: tuple[float, ...] = field(default=(), repr=False)

    def measures(self) -> dict[str, float]:
        """The measures that were taken, by name; NaN where there is no direction."""
        taken = ((name, getattr(self, name)) for name in MEASURES)
        return {name: value for name, value in taken if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the quantiles, without the measures that were not taken."""
        record = {name: getattr(self, name) for name in _RECORD}
        return {**record, **self.measures(), "standard_error": dict(self.standard_error)}


_RECORD = ("kind", "rows_seen", "rows_total", "rows_without_gradient", "gradient_factor")
_ABOUT_MEASURES = ("standard_error", "scale_quantiles", "row_cosine_quantiles")
# Every measure, in the order of tables and dashboards.
MEASURES: tuple[str, ...] = tuple(
    f.name for f in fields(LayerReading) if f.name not in _RECORD + _ABOUT_MEASURES
)

# Which end of a measure is the bad one. Measures that are missing here have no bad end: their
# spread between layers is what tells.
WORST: Mapping[str, Literal["min", "max"]] = MappingProxyType(
    {
        "update_cosine": "min",
        "gradient_cosine": "min",
        "diagonal_cosine": "min",
        "attainable_cosine": "min",
        "scale_cv": "max",
        "interference_ratio": "max",
        "row_cosine_mean": "min",
        "row_cosine_p05": "min",
        "row_cosine_p50": "min",
        "row_cosine_p95": "min",
        "harmed_fraction": "max",
        "descent": "min",
        "parameter_cosine": "min",
        "projection_cosine": "min",
        "applied_cosine": "min",
    }
)


@dataclass(frozen=True)
class MeasureSummary:
    """One measure over all layers that have it (NaN left out)."""

    min: float
    median: float
    max: float
    min_layer: str
    max_layer: str


@dataclass(frozen=True)
class StepReport:
    """All layers at one step.

    Attributes:
        step: optimizer steps taken before this one: the first is 0.
        layers: readings by module path.
        unsupported: module path → why this module, which has parameters, was not measured.
        coverage: share of the trainable parameters' elements that lie in measured layers, 0 to 1.
        notes: what else a reader must know to trust the numbers, one sentence each.
        interval: steps from one measured step to the next, as it stood at this one.
    """

    step: int
    layers: Mapping[str, LayerReading]
    unsupported: Mapping[str, str]
    coverage: float
    notes: tuple[str, ...] = ()
    interval: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as nested plain data."""
        return {
            "step": self.step,
            "interval": self.interval,
            "coverage": self.coverage,
            "notes": list(self.notes),
            "unsupported": dict(self.unsupported),
            "layers": {path: reading.to_dict() for path, reading in self.layers.items()},
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat record per layer, ready for a data frame."""
        return [
            {"step": self.step, "layer": path, **reading.to_dict()}
            for path, reading in self.layers.items()
        ]

    def summary(self) -> dict[str, MeasureSummary]:
        """Smallest, median and largest value of every measure, and the layers they belong to."""
        return {
            name: MeasureSummary(
                min=values[0][0],
                median=median(value for value, _ in values),
                max=values[-1][0],
                min_layer=values[0][1],
                max_layer=values[-1][1],
            )
            for name in MEASURES
            if (values := self._sorted(name))
        }

    def _sorted(self, measure: str) -> list[tuple[float, str]]:
        values = ((getattr(reading, measure), path) for path, reading in self.layers.items())
        return sorted((v, path) for v, path in values if v is not None and not math.isnan(v))

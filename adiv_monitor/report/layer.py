"""What is said of one layer, and which measures there are."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from adiv_monitor.report.written import read

# Kinds of layers that hold no map from features to features: gains and offsets of normalisations,
# and look-up tables. Their scales and steps are not comparable with those of the maps.
NO_MAPS = ("gain", "offset", "embedding")

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
            all measures but `idle_share` leave them out.
        gradient_factor: what happened to the gradient between the backward pass and the step:
            ‖gradient the optimizer saw‖ / ‖gradient that backward left‖. 1 when nothing did;
            below 1 after clipping, 1/65536 after unscaling an AMP loss; NaN where it can't be told.
            What DDP and FSDP average over ranks is part of the backward pass.
        features: how many numbers of a row the weight multiplies, the fan-in; None where a row is
            no such vector (a look-up, a module as a whole).
        non_finite: what of the layer is NaN, infinite, or too large for its square: some of
            "inputs", "outputs", "gradient" and "update"; empty: nothing that was looked at.
        standard_error: measure → standard error, for those measures that rest on sampled rows; the
            others are exact.
        scale_quantiles: the row scale at `QUANTILE_LEVELS`.
        row_cosine_quantiles: the row cosine at `QUANTILE_LEVELS`.
        module: class name of the module that holds the layer's weight, e.g. "Linear"; "" where that
            is not known.

    All other attributes are the measures of `measures.py`, under their names there.
    """

    _null_is_nan: ClassVar[bool] = True  # what is None is left out
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
    realised_cosine: float | None = None
    single_layer_share: float | None = None
    first_order_error: float | None = None
    parameter_cosine: float | None = None
    projection_cosine: float | None = None
    applied_cosine: float | None = None
    features: int | None = None
    non_finite: tuple[str, ...] = ()
    standard_error: Mapping[str, float] = field(default_factory=dict)
    scale_quantiles: tuple[float, ...] = field(default=(), repr=False)
    row_cosine_quantiles: tuple[float, ...] = field(default=(), repr=False)
    module: str = ""

    def measures(self) -> dict[str, float]:
        """The measures that were taken, by name; NaN where there is no direction."""
        taken = ((name, getattr(self, name)) for name in MEASURES)
        return {name: value for name, value in taken if value is not None}

    def to_dict(self, *, quantiles: bool = False) -> dict[str, Any]:
        """Everything, without the measures that were not taken; the quantiles only if asked."""
        record = {name: getattr(self, name) for name in _RECORD}
        record |= {"module": self.module} if self.module else {}
        record |= {} if self.features is None else {"features": self.features}
        record |= {"non_finite": list(self.non_finite)} if self.non_finite else {}
        record |= {**self.measures(), "standard_error": dict(self.standard_error)}
        return record | {n: list(getattr(self, n)) for n in _QUANTILES} if quantiles else record

    def lean(self) -> "LayerReading":
        """The reading without its distributions over rows."""
        bare = copy(self)  # a third of the time that `replace` takes
        vars(bare).update(dict.fromkeys(_QUANTILES, ()))
        return bare

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "LayerReading":
        """The reading that `to_dict` made a record of; see `StepReport.from_dict`."""
        return read(LayerReading, record)


_RECORD = ("kind", "rows_seen", "rows_total", "rows_without_gradient", "gradient_factor")
_QUANTILES = ("scale_quantiles", "row_cosine_quantiles")
_ABOUT_MEASURES = ("features", "non_finite", "module", "standard_error", *_QUANTILES)
# Every measure, in the order of tables and dashboards.
MEASURES: tuple[str, ...] = tuple(
    f.name for f in fields(LayerReading) if f.name not in _RECORD + _ABOUT_MEASURES
)

# Those that take another run of the step's forward passes.
REALISED_MEASURES = ("realised_cosine", "single_layer_share", "first_order_error")

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
        "realised_cosine": "min",
        "first_order_error": "max",
        "parameter_cosine": "min",
        "projection_cosine": "min",
        "applied_cosine": "min",
        "attention_cosine": "min",
        "attention_gradient_cosine": "min",
        "attention_scale_cv": "max",
    }
)

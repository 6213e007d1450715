"""The reading of one layer, and the list of measures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from adiv_monitor.report.reading import Reading, measures_of

# Kinds of layers that do not map features to features: gains and offsets of normalisations, and
# look-up tables. Their scales and steps are not comparable with those of maps.
NO_MAPS = ("gain", "offset", "embedding")


@dataclass(frozen=True)
class LayerReading(Reading):
    """The reading of one layer at one step.

    Attributes:
        kind: how the layer is linear in its parameters, e.g. "linear", "convolution".
        rows_seen: rows that were examined.
        rows_total: rows that received a gradient in this step, over all micro-batches and calls.
        rows_without_gradient: examined rows whose gradient is exactly zero (padding, masked
            tokens): zero-gradient rows, which all measures but `idle_share` leave out.
        gradient_factor: factor of the gradient that the optimizer saw, relative to that of the
            rows. 1 if unchanged; below 1 after clipping, 1/65536 after unscaling an AMP loss; NaN
            where it is unknown. Averaging over ranks is not included.
        features: number of features of a row that the weight multiplies, the fan-in; None where a
            row is not such a vector (a look-up, a module as a whole).
        non_finite: tensors of the layer with a value that is NaN, infinite, or too large to square:
            some of "inputs", "outputs", "gradient" and "update"; empty: all examined are finite.
        earlier_share: norm of the gradient that `.grad` held before this step's first backward
            pass, over the norm of the gradient that the optimizer saw; 0 if `.grad` was zeroed.
        foreign_share: norm of what is no multiple of the rows' gradient in the gradient that the
            optimizer saw, over the norm of that; 0 if nothing is, or if it is not known.
        standard_error: measure → standard error, for measures that rest on sampled rows; the others
            are exact.
        module: class name of the module that holds the layer's weight, e.g. "Linear"; "" if
            unknown.
        own: values of `Monitor(own_measures=…)` by name; empty for layers without plain rows.

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
    realised_cosine: float | None = None
    single_layer_share: float | None = None
    first_order_error: float | None = None
    parameter_cosine: float | None = None
    projection_cosine: float | None = None
    applied_cosine: float | None = None
    activation_rms: float | None = None
    activation_gradient_rms: float | None = None
    activation_max: float | None = None
    activation_kurtosis: float | None = None
    zero_share: float | None = None
    silent_share: float | None = None
    gradient_norm: float | None = None
    update_norm: float | None = None
    weight_norm: float | None = None
    weight_update_ratio: float | None = None
    update_rms: float | None = None
    unchanged_share: float | None = None
    expert_load_max: float | None = None
    expert_load_cv: float | None = None
    idle_expert_share: float | None = None
    features: int | None = None
    non_finite: tuple[str, ...] = ()
    earlier_share: float = 0.0
    foreign_share: float = 0.0
    standard_error: Mapping[str, float] = field(default_factory=dict)
    module: str = ""
    own: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the reading as plain data, without measures not taken."""
        record = super().to_dict()
        for name in ("module", "features", "non_finite", "earlier_share", "foreign_share", "own"):
            if not record.get(name):
                record.pop(name, None)
        return record


# All measures, in the order of tables and dashboards.
MEASURES = measures_of(LayerReading)

# Measures that need a second run of the step's forward passes.
REALISED_MEASURES = ("realised_cosine", "single_layer_share", "first_order_error")

# Measures of size: what users compare with other tools. Title, and formula with its unit.
SIZES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "activation_rms": ("RMS of the outputs", "‖z‖ / √(N n), of N rows of n entries"),
        "activation_gradient_rms": ("RMS of the outputs' gradient", "‖G‖ / √(N n)"),
        "activation_max": ("Largest output", "max |z_n| of the sample"),
        "activation_kurtosis": ("Kurtosis of the outputs", "mean z⁴ / (mean z²)²; 3 if normal"),
        "zero_share": ("Shut units", "share of the entries g_n = 0 of rows with a gradient"),
        "silent_share": ("Silent units", "share of the units whose g_n is 0 in all sampled rows"),
        "gradient_norm": ("Gradient norm", "‖γ‖, as the optimizer saw it"),
        "update_norm": ("Update norm", "‖ΔΘ‖"),
        "weight_norm": ("Weight norm", "‖Θ‖, before the step"),
        "weight_update_ratio": ("Update to weight", "‖ΔΘ‖ / ‖Θ‖"),
        "update_rms": ("RMS of the update", "‖ΔΘ‖ / (√size η), per unit of learning rate"),
        "unchanged_share": ("Unchanged weights", "share of those with a gradient: rounded away"),
        "expert_load_max": ("Fullest expert", "its rows over the mean expert's"),
        "expert_load_cv": ("Spread of the experts' rows", "std / mean"),
        "idle_expert_share": ("Idle experts", "share of the experts without rows"),
    }
)

# Which end of a measure is the bad one. Measures that are missing here have no bad end: their
# spread between layers is informative instead.
_LOWEST = (
    *("update_cosine", "gradient_cosine", "diagonal_cosine", "attainable_cosine", "descent"),
    *("row_cosine_mean", "row_cosine_p05", "row_cosine_p50", "row_cosine_p95", "realised_cosine"),
    *("parameter_cosine", "projection_cosine", "applied_cosine"),
    *("attention_cosine", "attention_gradient_cosine"),
)
_HIGHEST = (
    *("scale_cv", "interference_ratio", "harmed_fraction", "first_order_error"),
    *("attention_scale_cv", "expert_load_max", "expert_load_cv", "idle_expert_share"),
)
WORST: Mapping[str, Literal["min", "max"]] = MappingProxyType(
    {**dict.fromkeys(_LOWEST, "min"), **dict.fromkeys(_HIGHEST, "max")}
)

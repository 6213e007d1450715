"""Rounding of readings to their significant digits, which keeps report.json small."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from adiv_monitor.report import StepReport

# Significant digits: float32, in which models compute, has seven; quantiles are of some hundred
# sampled rows, and standard errors are estimates themselves.
MEASURES, QUANTILES, ERRORS = 7, 5, 3
_OF = {
    "scale_quantiles": QUANTILES,
    "row_cosine_quantiles": QUANTILES,
    "standard_error": ERRORS,
    "heads_standard_error": ERRORS,
}

T = TypeVar("T")


def told(report: StepReport) -> StepReport:
    """Return a report whose readings have only significant digits."""
    return replace(
        report,
        layers={path: _rounded(reading) for path, reading in report.layers.items()},
        attention={path: _rounded(reading) for path, reading in report.attention.items()},
        alignment={path: _rounded(reading) for path, reading in report.alignment.items()},
    )


def _rounded(reading: T) -> T:
    assert is_dataclass(reading)
    values = {f.name: getattr(reading, f.name) for f in fields(reading)}
    changed = {name: _cut(value, _OF.get(name, MEASURES)) for name, value in values.items()}
    return replace(reading, **changed)  # type: ignore[type-var]


def _cut(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: _cut(item, digits) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_cut(item, digits) for item in value)
    return value

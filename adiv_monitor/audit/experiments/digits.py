"""Rounding of readings to their significant digits, which keeps report.json small."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from adiv_monitor.report import StepReport


def told(report: StepReport) -> StepReport:
    """Return a report whose readings have seven significant digits, as float32 has."""
    parts = ("layers", "attention", "alignment")
    return replace(report, **{name: _cut(getattr(report, name)) for name in parts})


def _cut(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _cut(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_cut, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _cut(getattr(value, f.name)) for f in fields(value)})
    return value

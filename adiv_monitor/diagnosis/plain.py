"""The audit's data classes as nested plain data and strict JSON; `read` reads them back."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from adiv_monitor.report import StepReport


def to_plain(value: Any) -> Any:
    """Convert to dictionaries with text keys, lists, numbers, texts, booleans and None."""
    if isinstance(value, StepReport):
        return value.to_dict(quantiles=True)
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def to_json(value: Any) -> str:
    """Return strict JSON; numbers that are not finite become "NaN", "Infinity" or "-Infinity"."""
    return json.dumps(_strict(value), allow_nan=False, separators=(",", ":"))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value

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
    return json.dumps(strict(value, nan="NaN"), allow_nan=False, separators=(",", ":"))


def strict(value: Any, *, nan: str | None) -> Any:
    """Replace every float that JSON lacks in nested data; `nan` stands for NaN."""
    if isinstance(value, dict):
        return {key: strict(item, nan=nan) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item, nan=nan) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return nan if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value

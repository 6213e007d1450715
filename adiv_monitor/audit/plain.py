"""The audit's data classes as nested plain data, as strict JSON, and back again, exactly."""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from adiv_monitor.report import StepReport

T = TypeVar("T")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_plain(value: Any) -> Any:
    """Dictionaries with keys of text, lists, numbers, texts, booleans and None."""
    if isinstance(value, StepReport):
        return value.to_dict(quantiles=True)
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], value: Any) -> T:
    """What `to_plain` made plain.

    Fields that are missing take their defaults, and those that the class does not have are passed
    over: what an earlier or later version wrote can be read.

    Raises:
        ValueError: a field is missing that has no default.
    """
    return cast(T, _read(kind, value))


def to_json(value: Any) -> str:
    """Strict JSON of plain data; numbers that are not finite are the texts "NaN", "Infinity" …."""
    return json.dumps(_strict(value), allow_nan=False, separators=(",", ":"))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _read(kind: Any, value: Any) -> Any:
    """A value of a field of this type."""
    if kind is StepReport:
        return StepReport.from_dict(value)
    if isinstance(kind, type) and is_dataclass(kind):
        return _read_fields(kind, value)
    if kind is Any:
        return _read_anything(value)
    if kind is float:
        return _NOT_FINITE[value] if isinstance(value, str) else value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(arguments[0], value)
    if origin is tuple:
        return tuple(_read(arguments[0], item) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key_kind, item_kind = arguments
        return {key_kind(key): _read(item_kind, item) for key, item in value.items()}
    return value


def _read_fields(kind: type[Any], value: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)
    read = {f.name: _read(hints[f.name], value[f.name]) for f in fields(kind) if f.name in value}
    try:
        return kind(**read)
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__}: got a record that is not complete ({error}), expected one that an "
            "audit wrote"
        ) from error


def _read_anything(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, list):
        return tuple(map(_read_anything, value))
    if isinstance(value, dict):
        return {key: _read_anything(item) for key, item in value.items()}
    return value

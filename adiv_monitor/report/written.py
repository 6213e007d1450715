"""Data classes as plain data such as JSON, and back, with checks of every value."""

import math
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST = 2**63 - 1


def plain(value: Any) -> Any:
    """Return nested plain data, from which `read` makes the value again.

    Data classes become dicts by field, of which those with `_null_is_nan` leave out what is None.
    """
    if is_dataclass(value):
        leaves_out = getattr(value, "_null_is_nan", False)
        held = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {name: plain(x) for name, x in held if not (leaves_out and x is None)}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [*map(plain, value)] if isinstance(value, list | tuple) else value


def read(kind: type[T], value: Any) -> T:
    """Read a data class from nested plain data, with every value of its field's type.

    Missing fields take their defaults, and unknown fields are ignored, so records of earlier and
    later versions can be read. Numbers that are not finite are the texts "NaN", "Infinity" and
    "-Infinity"; null in place of a number is NaN.

    Raises:
        ValueError: a value does not fit, or a field without default is missing.
    """
    return cast(T, _value(kind, value, kind.__name__))


def _misfit(where: str, value: Any, expected: str) -> ValueError:
    got = "null" if value is None else reprlib.repr(value)
    return _error(where, f"got {got}, expected {expected}")


def _error(where: str, said: str) -> ValueError:
    return ValueError(f"{where.replace('.', ': ', 1)}: {said}")


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind) or kind, get_args(kind)


def _value(kind: Any, value: Any, where: str) -> Any:
    """Return a value of this type; `where` is its place, behind the name of the outermost type."""
    if kind in _PLAIN:
        return _PLAIN[kind](value, where)
    origin, arguments = _parts(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _value(inner, value, where)
    if origin is Literal:
        if value not in arguments:
            raise _misfit(where, value, f"one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _misfit(where, value, "a list")
        return tuple(_value(arguments[0], x, f"{where}[{i}]") for i, x in enumerate(value))
    if isinstance(kind, TypeVar):  # of a generic data class
        return _anything(value, where)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return origin(value)
    if not isinstance(value, Mapping):
        raise _misfit(where, value, "an object")
    if is_dataclass(origin):
        return _object(origin, value, where)
    of_key, of_value = arguments
    inside = ((key, f"{where}[{reprlib.repr(key)}]") for key in value)
    return {_key(of_key, key, at): _value(of_value, value[key], at) for key, at in inside}


@cache
def _fields(kind: Any) -> list[tuple[str, Any, bool]]:
    """Return name and type of each field, and whether it is required.

    With `_null_is_nan`, null means NaN, and absence None.
    """
    hints, null_is_nan = get_type_hints(kind), getattr(kind, "_null_is_nan", False)
    return [
        (
            f.name,
            float if null_is_nan and hints[f.name] == float | None else hints[f.name],
            f.default is MISSING and f.default_factory is MISSING,
        )
        for f in fields(kind)
    ]


def _object(kind: Any, value: Mapping[Any, Any], where: str) -> Any:
    found = {}
    for name, of, is_required in _fields(kind):
        if name in value:
            found[name] = _value(of, value[name], f"{where}.{name}")
        elif is_required:
            raise _error(f"{where}.{name}", "got nothing, expected an entry of this name")
    try:
        return kind(**found)
    except ValueError as error:  # raised for a combination of fields
        raise _error(where, str(error)) from None


def _key(kind: Any, key: Any, where: str) -> Any:
    """Return the key of an object, which JSON stores as text."""
    if kind is str:
        return _text(key, where)
    try:
        return _PLAIN[kind](kind(key), where)
    except (ValueError, OverflowError):
        expected = "whole number" if kind is int else "number"
        raise _misfit(where, key, f"a key that is a {expected}") from None


def _number(value: Any, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:
            pass
    raise _misfit(where, value, 'a number, "NaN", "Infinity" or "-Infinity"')


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or abs(int(value)) > _LARGEST:
        raise _misfit(where, value, "a whole number of 64 bits")
    return int(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _misfit(where, value, "text")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _misfit(where, value, "true or false")
    return value


def _anything(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, list | tuple):
        return tuple(_anything(item, where) for item in value)
    if isinstance(value, Mapping):
        return {key: _anything(item, where) for key, item in value.items()}
    return value


_PLAIN: dict[Any, Callable[[Any, str], Any]] = {
    float: _number,
    int: _whole,
    str: _text,
    bool: _flag,
    Any: _anything,
}

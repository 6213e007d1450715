"""Reading of data classes from plain data such as JSON, with checks of every value."""

import math
import reprlib
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST = 2**63 - 1


class _Misfit(Exception):
    """Error for a value that does not fit; each enclosing container adds its place."""

    def __init__(self, said: str) -> None:
        self.said = said
        self.where = ""

    def inside(self, place: str) -> "_Misfit":
        self.where = place + self.where
        return self


def read(kind: type[T], value: Any) -> T:
    """Read a data class from nested plain data, with every value of its field's type.

    Missing fields take their defaults, and unknown fields are ignored, so records of earlier and
    later versions can be read. Numbers that are not finite are the texts "NaN", "Infinity" and
    "-Infinity"; null in place of a number is NaN.

    Raises:
        ValueError: a value does not fit, or a field without default is missing.
    """
    try:
        return cast(T, _reader(cast(Hashable, kind))(value))
    except _Misfit as error:
        where = error.where.removeprefix(".")
        said = f"{where}: {error.said}" if where else error.said
    except RecursionError:
        said = "got data that are nested too deeply, expected those that a report was written as"
    raise ValueError(f"{kind.__name__}: {said}")


def _misfit(value: Any, expected: str) -> _Misfit:
    return _Misfit(f"got {'null' if value is None else reprlib.repr(value)}, expected {expected}")


@cache
def _reader(kind: Hashable) -> Reader:
    """Return the function that reads a value of a field of this type."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(made := origin or kind, type) and is_dataclass(made):
        return _object(made)
    if isinstance(kind, TypeVar):  # of a generic data class
        return _anything
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return _optional(_reader(inner))
    if origin is Literal:
        return _choice(arguments)
    if origin is tuple:
        return _list(_reader(arguments[0]))
    return _mapping(arguments[0], _reader(arguments[1]))


def _object(kind: type) -> Reader:
    """Return the reader of a data class; with `_null_is_nan`, null means NaN, absence None."""
    hints = get_type_hints(kind)
    required = {
        f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
    }
    null_is_nan = getattr(kind, "_null_is_nan", False)
    readers = {
        f.name: _number if null_is_nan and hints[f.name] == float | None else _reader(hints[f.name])
        for f in fields(kind)
    }

    def read_object(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _misfit(value, "an object")
        found = {}
        for name, reader in readers.items():
            try:
                if name in value:
                    found[name] = reader(value[name])
                elif name in required:
                    raise _Misfit("got nothing, expected an entry of this name")
            except _Misfit as error:
                raise error.inside(f".{name}") from None
        try:
            return kind(**found)
        except ValueError as error:  # raised for a combination of fields
            raise _Misfit(str(error)) from None

    return read_object


def _optional(inner: Reader) -> Reader:
    def read_optional(value: Any) -> Any:
        try:
            return None if value is None else inner(value)
        except _Misfit as error:
            if not error.where:
                error.said += ", or null"
            raise

    return read_optional


def _choice(choices: tuple[Any, ...]) -> Reader:
    def read_choice(value: Any) -> Any:
        if value not in choices:
            raise _misfit(value, f"one of {', '.join(map(repr, choices))}")
        return value

    return read_choice


def _list(inner: Reader) -> Reader:
    def read_list(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _misfit(value, "a list")
        found = []
        for i, item in enumerate(value):
            try:
                found.append(inner(item))
            except _Misfit as error:
                raise error.inside(f"[{i}]") from None
        return tuple(found)

    return read_list


def _mapping(kind: Any, inner: Reader) -> Reader:
    """Return the reader of an object with arbitrary keys, which JSON stores as text."""

    def read_mapping(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _misfit(value, "an object")
        found = {}
        for key, item in value.items():
            try:
                found[_key(kind, key)] = inner(item)
            except _Misfit as error:
                raise error.inside(f"[{reprlib.repr(key)}]") from None
        return found

    return read_mapping


def _key(kind: Any, key: Any) -> Any:
    if kind is str:
        return _text(key)
    try:
        return _PLAIN[kind](kind(key))
    except (ValueError, OverflowError):
        expected = "whole number" if kind is int else "number"
        raise _misfit(key, f"a key that is a {expected}") from None


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    expected = 'a number, "NaN", "Infinity" or "-Infinity"'
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _misfit(value, expected)
    try:
        return float(value)
    except OverflowError:
        raise _misfit(value, expected) from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or abs(int(value)) > _LARGEST:
        raise _misfit(value, "a whole number of 64 bits")
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _misfit(value, "text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _misfit(value, "true or false")
    return value


def _anything(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, list | tuple):
        return tuple(map(_anything, value))
    if isinstance(value, Mapping):
        return {key: _anything(item) for key, item in value.items()}
    return value


_PLAIN: dict[Any, Reader] = {
    float: _number,
    int: _whole,
    str: _text,
    bool: _flag,
    Any: _anything,
}

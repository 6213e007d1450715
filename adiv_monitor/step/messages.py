"""Encoding of data classes as bytes by their annotations, for messages between ranks.

Anyone who can reach the ranks' store can write to it. So a message is pure data: nothing in it is
executed, decoded values have the annotated types, and decoding takes at most a constant times the
message's size in memory. The layout, little-endian:

    8 bytes     version of the layout
    4 bytes     CRC-32 of all that follows
    8 bytes     n, the length of the text
    n bytes     JSON: the field values of a data class, the pairs of a mapping, the shape of an
                array
    the rest    the numbers of the arrays, in the order of their shapes
"""

import json
import math
import operator
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

_LAYOUT = b"adiv-m1\n"
_CHECKSUM, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")
_LARGEST = 2**63  # bound of the absolute values of integers
_SEVERAL = {list: list, tuple: tuple, set: set}

T = TypeVar("T")


class Malformed(ValueError):
    """Raised for bytes that are no message of the expected kind."""


def encode(value: Any) -> bytes:
    """Encode a data class as bytes.

    Raises:
        TypeError: a value does not match its annotation, or can't be encoded.
    """
    arrays: list[bytes] = []
    text = json.dumps(_plain(type(value), value, arrays)).encode()
    body = b"".join([_LENGTH.pack(len(text)), text, *arrays])
    return b"".join([_LAYOUT, _CHECKSUM.pack(zlib.crc32(body)), body])


def decode(kind: type[T], data: bytes) -> T:
    """Decode bytes from `encode` to a data class.

    Args:
        kind: the data class.
        data: the bytes, which are not trusted.

    Raises:
        Malformed: the bytes are no such message.
    """
    start = len(_LAYOUT) + _CHECKSUM.size
    head = data[:start]
    if head != _LAYOUT + _CHECKSUM.pack(zlib.crc32(memoryview(data)[start:])):
        raise Malformed("another layout, or a message that was changed")
    try:
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        if length > len(data) - start:
            raise Malformed("the text is cut off")
        arrays = _Arrays(data, start + length)
        found: T = _typed(kind, json.loads(data[start : start + length]), arrays)
    except Malformed:
        raise
    except (ValueError, RecursionError, struct.error) as error:
        raise Malformed(str(error)) from error
    arrays.end()
    return found


class _Arrays:
    """Reader of a message's arrays, one after the other."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self._place = place

    def next(self, number: type[np.generic], shape: Iterable[int]) -> Any:
        shape = tuple(shape)
        count = math.prod(shape)
        size = count * np.dtype(number).itemsize
        # Lengths are bounded even for an array without elements.
        if size > len(self._data) - self._place or any(n > len(self._data) for n in shape):
            raise Malformed("an array is cut off")
        flat = np.frombuffer(self._data, np.dtype(number).newbyteorder("<"), count, self._place)
        self._place += size
        return flat.reshape(shape).astype(number)

    def end(self) -> None:
        """Check that all of the message has been read."""
        if self._place != len(self._data):
            raise Malformed("the message is longer than its text declares")


def _plain(kind: Any, value: Any, arrays: list[bytes]) -> Any:
    """Convert a value of an annotated kind for JSON; append the numbers of arrays to `arrays`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _plain(_optional(inner), value, arrays)
    if origin is np.ndarray:
        array = np.asarray(value)
        if array.dtype != _number(inner):
            raise TypeError(f"an array of {array.dtype}, expected {_number(inner).__name__}")
        arrays.append(array.astype(array.dtype.newbyteorder("<"), order="C").tobytes())
        return list(array.shape)
    if origin in _SEVERAL:
        return [_plain(inner[0], each, arrays) for each in value]
    if origin in (dict, Mapping):
        of_key, of_value = inner
        return [[_plain(of_key, k, arrays), _plain(of_value, v, arrays)] for k, v in value.items()]
    if (hints := _annotated(kind)) is not None:
        return [_plain(of, getattr(value, name), arrays) for name, of in hints]
    if isinstance(value, Enum) and isinstance(value, kind):
        return value.value
    if kind is str and isinstance(value, str):
        return value
    if kind is bool and isinstance(value, bool | np.bool_):
        return bool(value)
    if kind is int:
        return operator.index(value)
    if kind is float:
        return float(value)
    raise TypeError(f"{value!r} is no {kind} that a message can hold")


def _typed(kind: Any, plain: Any, arrays: _Arrays) -> Any:
    """Convert a result of `_plain` back to a value of the annotated kind."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if plain is None else _typed(_optional(inner), plain, arrays)
    if kind in (int, bool, str, float):
        if type(plain) is not kind or (kind is int and not -_LARGEST < plain < _LARGEST):
            raise Malformed(f"no {kind.__name__}")
        return plain
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(plain)
    if type(plain) is not list:
        raise Malformed("no list")
    if origin is np.ndarray:
        shape = [_typed(int, length, arrays) for length in plain]
        if any(length < 0 for length in shape):
            raise Malformed("a length below zero")
        return arrays.next(_number(inner), shape)
    if origin in _SEVERAL:
        return _SEVERAL[origin](_typed(inner[0], each, arrays) for each in plain)
    if origin in (dict, Mapping):
        if any(type(pair) is not list or len(pair) != 2 for pair in plain):
            raise Malformed("no pairs")
        return {_typed(inner[0], k, arrays): _typed(inner[1], v, arrays) for k, v in plain}
    hints = _annotated(kind)
    if hints is None:
        raise Malformed(f"no message can hold {kind}")
    if len(plain) != len(hints):
        raise Malformed(f"a number of fields that no {kind} has")
    pairs, make = zip(hints, plain, strict=True), origin or kind
    return make(**{name: _typed(of, each, arrays) for (name, of), each in pairs})


@cache
def _annotated(kind: Any) -> list[tuple[str, Any]] | None:
    """Return the fields of a data class, in order, with their types; None for other types."""
    origin = get_origin(kind) or kind
    if not is_dataclass(origin):
        return None
    hints = get_type_hints(origin)
    named = dict(zip(getattr(origin, "__parameters__", ()), get_args(kind), strict=True))
    return [(field.name, _filled_in(hints[field.name], named)) for field in fields(origin)]


def _filled_in(hint: Any, named: Mapping[Any, Any]) -> Any:
    """Return an annotation with its type variables replaced by types."""
    if isinstance(hint, TypeVar):
        return named[hint]
    inner = getattr(hint, "__parameters__", ())
    return hint[tuple(named[each] for each in inner)] if inner else hint


def _optional(kinds: Iterable[Any]) -> Any:
    """Return the type of an optional annotation that is not None."""
    (kind,) = (kind for kind in kinds if kind is not NoneType)
    return kind


def _number(inner: tuple[Any, ...]) -> Any:
    """Return the annotated number type of an array."""
    return get_args(inner[1])[0]

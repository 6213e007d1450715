"""Operations on all numbers at once of data classes that are generic in them (`maths/sums.py`).

A field holds numbers if its annotation names the type variable. It may hold one number, several in
a tuple or dict, records of numbers, or None.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

__all__ = ["R", "joined", "numbers_of", "replaced", "with_numbers"]

R = TypeVar("R")


class _Kind:
    """The fields of a record class, to take records apart and rebuild them with few calls.

    Args:
        kind: the class.

    Attributes:
        places: names of its fields, with their places in its constructor.
        values: function that returns a record's field values in this order.
        numbers: indices of the fields that hold numbers.
    """

    def __init__(self, kind: Any) -> None:
        hints = get_type_hints(kind)
        self.places = {f.name: place for place, f in enumerate(fields(kind))}
        self.values: Callable[[Any], Sequence[Any]] = attrgetter(*self.places)
        self.numbers = [
            place
            for name, place in self.places.items()
            if isinstance(hints[name], TypeVar) or bool(getattr(hints[name], "__parameters__", ()))
        ]


def _learnt(kind: Any) -> _Kind | None:
    return _Kind(kind) if hasattr(kind, "__dataclass_fields__") else None


_kind_of: Callable[[Any], _Kind | None] = cache(_learnt)  # None: the class is no record


def numbers_of(record: object) -> list[Any]:
    """Return all numbers of a record in a fixed order; a bare number gives itself."""
    found: list[Any] = []
    _collect((record,), found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    kind = _kind_of(type(value))
    if kind is not None:
        values = kind.values(value)
        parts: Any = [values[place] for place in kind.numbers]
    else:
        parts = value.values() if type(value) is dict else value
    for part in parts:
        if part is None:
            continue
        if type(part) in (dict, tuple) or _kind_of(type(part)) is not None:
            _collect(part, found)
        else:
            found += (part,)


def with_numbers(record: R, numbers: Sequence[Any]) -> R:
    """Return the record with other numbers, given in the order of `numbers_of`."""
    made: R = _put((record,), numbers, 0)[0][0]
    return made


def _put(value: Any, numbers: Sequence[Any], at: int) -> tuple[Any, int]:
    """Return the value with the numbers from index `at` on, and the index after them."""
    kind = _kind_of(type(value))
    if kind is not None:
        parts: Any = list(kind.values(value))
        places: Any = kind.numbers
    else:
        parts = dict(value) if type(value) is dict else list(value)
        places = parts if type(value) is dict else range(len(parts))
    for place in places:
        part = parts[place]
        if part is None:
            continue
        if type(part) in (dict, tuple) or _kind_of(type(part)) is not None:
            parts[place], at = _put(part, numbers, at)
        else:
            parts[place] = numbers[at]
            at += 1
    if kind is not None:
        return type(value)(*parts), at
    return (parts if type(value) is dict else tuple(parts)), at


if TYPE_CHECKING:  # mypy checks field names and types for `dataclasses.replace` only
    from dataclasses import replace as replaced
else:

    def replaced(record: R, **values: object) -> R:
        """Return the record with some fields replaced: `dataclasses.replace` in fewer calls."""
        kind = _kind_of(type(record))
        every = list(kind.values(record))
        for name in values:
            every[kind.places[name]] = values[name]
        return type(record)(*every)


def joined(records: Sequence[R], of: Callable[[list[Any]], Any]) -> R:
    """Combine records of the same structure: apply a function to the list of each number."""
    several = zip(*map(numbers_of, records), strict=True)
    return with_numbers(records[0], [of(list(numbers)) for numbers in several])

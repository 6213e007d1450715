"""Data classes that are generic in their numbers (`maths/sums.py`): all of these at once.

A field holds numbers if its annotation names the type variable: one, several in a tuple or by key,
or records of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any, TypeVar, get_type_hints

R = TypeVar("R")


@cache
def _of_numbers(kind: Any) -> tuple[str, ...]:
    """The fields of a record that hold numbers."""
    hints = get_type_hints(kind)
    return tuple(
        f.name
        for f in fields(kind)
        if isinstance(hints[f.name], TypeVar) or bool(getattr(hints[f.name], "__parameters__", ()))
    )


@cache
def _is_record(kind: Any) -> bool:
    return hasattr(kind, "__dataclass_fields__")


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of a record, in their order, with the names of the fields that lead to them."""
    kind: Any = type(value)
    if value is None:
        return
    if _is_record(kind):
        for inner in _of_numbers(kind):
            yield from leaves(getattr(value, inner), f"{name}.{inner}" if name else inner)
    elif kind is dict:
        for each in value.values():
            yield from leaves(each, name)
    elif kind is tuple:
        for each in value:
            yield from leaves(each, name)
    else:
        yield name, value


def mapped(value: Any, of: Callable[[Any], Any]) -> Any:
    """The record with what a function makes of each of its numbers."""
    kind: Any = type(value)
    if value is None:
        return None
    if _is_record(kind):
        found = {name: mapped(getattr(value, name), of) for name in _of_numbers(kind)}
        return replace(value, **found)
    if kind is dict:
        return {key: mapped(each, of) for key, each in value.items()}
    if kind is tuple:
        return tuple([mapped(each, of) for each in value])
    return of(value)


def joined(records: Sequence[R], of: Callable[[list[Any]], Any]) -> R:
    """The first of several records that are alike, with what a function makes of all numbers."""
    several = [iter([number for _, number in leaves(record)]) for record in records]
    found: R = mapped(records[0], lambda _: of([next(numbers) for numbers in several]))
    return found


def split(record: R, count: int, of: Callable[[Any], Sequence[Any]]) -> list[R]:
    """Records alike, each with its part of what a function makes of every number."""
    parts = [of(number) for _, number in leaves(record)]
    owns = [iter([part[i] for part in parts]) for i in range(count)]
    return [mapped(record, partial(_following, own)) for own in owns]


def _following(numbers: Iterator[Any], _: Any) -> Any:
    return next(numbers)

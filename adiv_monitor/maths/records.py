"""Data classes that are generic in their numbers (`maths/sums.py`): all of these at once.

A field holds numbers if its annotation names the type variable: one, several in a tuple or by key,
or records of them. A step has many layers with many numbers each, so that what is asked of all of
them makes few calls.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, TypeVar, get_type_hints

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to take values of one type apart, and to make them again.

    Attributes:
        names: of the fields that hold numbers; none of a tuple, or a dictionary.
        take: what holds numbers in such a value.
        make: the same value with others in their place.
    """

    names: Sequence[str]
    take: Callable[[Any], Iterable[Any]]
    make: Callable[[Any, list[Any]], Any]


class _Plans(dict[type, _Plan | None]):
    """By type; None: such a value is a number itself."""

    def __missing__(self, kind: type) -> _Plan | None:
        plan = self[kind] = _of_record(kind) if is_dataclass(kind) else None
        return plan


def _of_record(kind: Any) -> _Plan:
    hints, every = get_type_hints(kind), [field.name for field in fields(kind)]
    places = [i for i, name in enumerate(every) if _holds_numbers(hints[name])]
    take, names = attrgetter(*every), [every[i] for i in places]

    def inner(value: Any) -> list[Any]:
        whole = take(value)
        return [whole[i] for i in places]

    def made(value: Any, others: list[Any]) -> Any:
        whole = [*take(value)]
        for i, other in zip(places, others, strict=True):
            whole[i] = other
        return kind(*whole)

    return _Plan(names, inner, made)


def _holds_numbers(hint: Any) -> bool:
    return isinstance(hint, TypeVar) or bool(getattr(hint, "__parameters__", ()))


_PLANS = _Plans(
    {
        dict: _Plan((), dict.values, lambda value, others: dict(zip(value, others, strict=True))),
        tuple: _Plan((), tuple, lambda _, others: tuple(others)),
    }
)


def numbers(record: Any) -> list[Any]:
    """The numbers of a record, in their order."""
    found: list[Any] = []
    _gather([record], found)
    return found


def _gather(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if value is not None:
            plan = _PLANS[value.__class__]
            if plan is None:
                found += (value,)
            else:
                _gather(plan.take(value), found)


def named(record: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of a record, in their order, with the names of the fields that lead to them."""
    plan = None if record is None else _PLANS[record.__class__]
    if plan is None:
        yield from () if record is None else [(name, record)]
        return
    parts = list(plan.take(record))
    for inner, part in zip(plan.names or [""] * len(parts), parts, strict=True):
        yield from named(part, f"{name}.{inner}".strip("."))


def with_numbers(record: Any, others: Iterator[Any]) -> Any:
    """The record with other numbers in place of its own, in their order."""
    plan = _PLANS[record.__class__]
    if plan is None:
        return next(others)
    made = [
        None
        if each is None
        else next(others)
        if _PLANS[each.__class__] is None
        else with_numbers(each, others)
        for each in plan.take(record)
    ]
    return plan.make(record, made)


def structure(record: Any) -> tuple[Any, ...]:
    """Which numbers a record has: what it has in common with those that are alike."""
    plan = _PLANS[record.__class__]
    parts = () if plan is None else plan.take(record)
    kinds = [x if x is None else _PLANS[x.__class__] is None or structure(x) for x in parts]
    return tuple(kinds)


def joined(records: Sequence[R], of: Callable[[list[Any]], Any]) -> R:
    """The first of several records that are alike, with what a function makes of all numbers."""
    several = zip(*map(numbers, records), strict=True)
    found: R = with_numbers(records[0], iter([of([*each]) for each in several]))
    return found


def split(record: R, of: Callable[[Any], Iterable[Any]]) -> list[R]:
    """Records alike, each with its part of what a function makes of every number."""
    parts = zip(*map(of, numbers(record)), strict=True)
    return [with_numbers(record, iter(part)) for part in parts]

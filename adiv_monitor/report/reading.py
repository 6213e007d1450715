"""What all readings of a report have in common: measures, and the way to plain data and back."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, TypeVar

from adiv_monitor.report.written import plain, read

R = TypeVar("R")


class Reading:
    """A data class with measures; one that is None was not taken, or is undefined."""

    _null_is_nan: ClassVar[bool] = True  # values that are None are left out

    def measures(self) -> dict[str, float]:
        """Return the measures that were taken, by name; NaN where there is no direction."""
        names = measures_of(type(self))  # type: ignore[arg-type] # classes are hashable
        taken = ((name, getattr(self, name)) for name in names)
        return {name: value for name, value in taken if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return the reading as plain data, without the measures that were not taken."""
        record: dict[str, Any] = plain(self)
        return record

    @classmethod
    def from_dict(cls: type[R], record: Mapping[str, Any]) -> R:
        """Read the reading back from a record of `to_dict`; see `StepReport.from_dict`."""
        return read(cls, record)


@cache
def measures_of(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of a reading's measures, in the order of tables and dashboards."""
    return tuple(f.name for f in fields(kind) if f.default is None and f.type == float | None)

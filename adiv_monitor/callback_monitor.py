"""A monitor in the hands of a Trainer: its options, and how it stops without an exception."""

import logging
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, Literal, TypedDict, TypeVar

from adiv_monitor.alarms import Rules
from adiv_monitor.capture.realised.losses import LossOf
from adiv_monitor.errors import AlarmError
from adiv_monitor.monitor import Monitor
from adiv_monitor.printable import printable

_logger = logging.getLogger("adiv_monitor")
Init = TypeVar("Init", bound=Callable[..., None])


class Options(TypedDict, total=False):
    """Arguments of `Monitor`, which explains them, that callbacks take as they are."""

    max_overhead: float | None
    layers_per_step: int | None
    max_rows: int | None
    attainable: bool
    attention: bool
    realised: bool | LossOf
    alarms: Rules
    on_alarm: Literal["warn", "stop"]
    on_error: Literal["warn", "raise"]
    seed: int


_OPTIONS = {name: signature(Monitor).parameters[name] for name in Options.__annotations__}


def with_options(init: Init) -> Init:
    """Have `help` and `inspect` show the options of `Monitor` in place of `**options`."""
    own = signature(init)
    named = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    init.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*named, *_OPTIONS.values()]
    )
    return init


def all_options(owner: str, given: Options) -> dict[str, Any]:
    """The options that were given, and the others as `Monitor` has them.

    Raises:
        TypeError: one is none; `owner` is the class that it was given to.
    """
    if unknown := [name for name in given if name not in _OPTIONS]:
        raise TypeError(f"{owner}() got an unexpected keyword argument {unknown[0]!r}")
    return {name: parameter.default for name, parameter in _OPTIONS.items()} | {**given}


class CallbackMonitor(Monitor):
    """Where a `Monitor(on_alarm="stop")` would raise, this one only keeps why.

    Attributes:
        alarmed: what would have been raised first; None: nothing so far. With several processes it
            is there in all of them in the same optimizer step, or in none.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.alarmed: AlarmError | None = None

    def _stop(self, error: AlarmError) -> None:
        self.alarmed = self.alarmed or error


def tell_why(error: AlarmError) -> None:
    """One line of the logger `adiv_monitor`: the training stops, and by which alarms."""
    _logger.warning("%s", printable(f"adiv-monitor: training stops: {error}"))

"""The monitor that trainer callbacks use: its options, and how it stops without an exception."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any, Literal, TypedDict

from adiv_monitor.alarms import Rules
from adiv_monitor.capture.loss_hook import LossOf
from adiv_monitor.capture.selection import LayerChoice
from adiv_monitor.errors import AlarmError
from adiv_monitor.monitor import Monitor
from adiv_monitor.printable import printable
from adiv_monitor.report import StepReport
from adiv_monitor.sinks import Sink
from adiv_monitor.sinks.borrowed import BorrowedSink, borrowed
from adiv_monitor.sinks.scalars import Metrics, Scalars
from adiv_monitor.step.own_measures import OwnMeasure
from adiv_monitor.step.schedule import Unasked

_logger = logging.getLogger("adiv_monitor")


class CallbackOptions(TypedDict, total=False):
    """Options that the callbacks of Lightning and of Hugging Face share.

    `Monitor` explains `max_overhead`, `layers_per_step`, `max_rows`,
    `attainable`, `attention`, `realised`, `own_measures`, `spectral`, `watch`, `alarms`,
    `on_alarm`, `on_error` and `seed`.

    Attributes:
        layers: glob patterns over module paths, or a predicate (path, module) → bool; all if None.
        measures: the measures that are logged. None: a selection.
        scalars: "few": loggers get the summary and blocks of layers; "all": every layer, too.
        separator: replaces the slash in the names of metrics, for callbacks and loggers: "_" makes
            them usable in file names. Dashboards that group by the slash do not group them then.
            TensorBoard's names keep the slash.
        sinks: further sinks, which stay open. Only rank 0 writes to them.
    """

    layers: LayerChoice
    measures: Iterable[str] | None
    scalars: Scalars
    separator: str
    sinks: Sequence[Sink]
    max_overhead: float | None
    layers_per_step: int | None
    max_rows: int | None
    attainable: bool
    attention: bool
    realised: bool | LossOf
    own_measures: Mapping[str, OwnMeasure] | None
    spectral: bool
    watch: Literal["loss", "norms"] | None
    alarms: Rules
    on_alarm: Literal["warn", "stop"]
    on_error: Literal["warn", "raise"]
    seed: int


_KNOWN = {**signature(Metrics).parameters, **signature(Monitor).parameters}
_DEFAULTS = {name: _KNOWN[name].default for name in CallbackOptions.__annotations__}


@dataclass(frozen=True)
class Settings:
    """The options of a callback, checked and completed with their defaults.

    Attributes:
        layers: as in `CallbackOptions`.
        metrics: metrics to log.
        sinks: further sinks, which are left open.
        monitor: further arguments of the callback's monitors.
    """

    layers: LayerChoice
    metrics: Metrics
    sinks: tuple[BorrowedSink, ...]
    monitor: Mapping[str, Any]

    @classmethod
    def of(cls, owner: str, given: CallbackOptions, every_n_steps: int | None = None) -> "Settings":
        """Check the options passed to a callback.

        Args:
            owner: name of the callback's class.
            given: options passed to its constructor.
            every_n_steps: interval passed to it; None: that of its Trainer, within `max_overhead`.

        Raises:
            TypeError: a name is not an option, or a sink is not a sink.
            ValueError: a measure or a choice is unknown.
        """
        if unknown := [name for name in given if name not in _DEFAULTS]:
            raise TypeError(f"{owner}() got an unexpected keyword argument {unknown[0]!r}")
        monitor = {**_DEFAULTS, **given}
        if isinstance(bound := monitor["max_overhead"], Unasked):
            monitor["max_overhead"] = float(bound) if every_n_steps is None else None
        logged = {f.name: monitor.pop(f.name) for f in fields(Metrics) if f.name in monitor}
        layers, sinks = monitor.pop("layers"), borrowed(monitor.pop("sinks"), owner)
        return cls(layers, Metrics(**logged), sinks, monitor)


class CallbackMonitor(Monitor):
    """A monitor that keeps the `AlarmError` that `Monitor(on_alarm="stop")` would raise.

    Args:
        name: name of its optimizer, if the Trainer has several.
        *args: as for `Monitor`.
        **options: as for `Monitor`.

    Attributes:
        alarmed: the first such error; None: none so far. With several ranks, all of them set it in
            the same optimizer step.
    """

    def __init__(self, *args: Any, name: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._called = name
        self.alarmed: AlarmError | None = None

    @property
    def completed(self) -> StepReport | None:
        """The last complete report. `latest` would complete one, while weights may still change."""
        return next(reversed(self._outlet.reports), None)

    def _name(self) -> str:
        return self._called and f"{self._called} ({type(self._training.optimizer).__name__})"

    def _stop(self, error: AlarmError) -> None:
        if self.alarmed is None:
            self.alarmed = error
            if self._controller.ranks.rank == 0:
                _logger.warning("%s", printable(f"adiv-monitor: training stops: {error}"))

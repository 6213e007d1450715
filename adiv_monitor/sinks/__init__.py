"""Sinks for reports. Every sink has `write(report)` and `close()`, so more are easily written.

A sink is imported when it is asked for, and the packages that it needs when it is constructed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adiv_monitor.report import StepReport
from adiv_monitor.report.step_report import show_by
from adiv_monitor.sinks.sink import Sink

if TYPE_CHECKING:
    from adiv_monitor.sinks.html import HtmlSink
    from adiv_monitor.sinks.jsonl import JsonlSink
    from adiv_monitor.sinks.memory import MemorySink
    from adiv_monitor.sinks.table import TableSink
    from adiv_monitor.sinks.tensorboard import TensorBoardSink
    from adiv_monitor.sinks.tracker import TrackerSink

__all__ = [
    "HtmlSink",
    "JsonlSink",
    "MemorySink",
    "Sink",
    "TableSink",
    "TensorBoardSink",
    "TrackerSink",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = import_module(f"{__name__}.{name.removesuffix('Sink').lower()}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_WAYS = {"text": "table.table_text", "html": "table.table_html", "figure": "plots.step_figure"}


def _shown(report: StepReport, way: str) -> Any:
    module, _, name = _WAYS[way].partition(".")
    return getattr(import_module(f"{__name__}.{module}"), name)(report)


show_by(_shown)

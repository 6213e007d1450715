"""Sinks for reports. Every sink has `write(report)` and `close()`, so more are easily written.

The packages that a sink needs are imported when it is constructed, not when this module is.
"""

from adiv_monitor.report.step_report import Ways, show_by
from adiv_monitor.sinks.html import HtmlSink
from adiv_monitor.sinks.jsonl import JsonlSink
from adiv_monitor.sinks.memory import MemorySink
from adiv_monitor.sinks.notebook import report_html
from adiv_monitor.sinks.plots import step_figure
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.sinks.table import TableSink, table_text
from adiv_monitor.sinks.tensorboard import TensorBoardSink

__all__ = ["HtmlSink", "JsonlSink", "MemorySink", "Sink", "TableSink", "TensorBoardSink"]

show_by(Ways(table_text, report_html, step_figure))
